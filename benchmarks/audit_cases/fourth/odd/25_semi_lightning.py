"""Semi-supervised: a labelled and an unlabelled loader of different length, combined."""
import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    return torch.randn(n, 10, generator=g) + 1.5 * F.one_hot(y, 10), y


class Semi(L.LightningModule):
    def __init__(self, threshold=0.7):
        super().__init__()
        self.threshold = threshold
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))

    def setup(self, stage):
        self.noise = torch.Generator().manual_seed(50 + self.global_rank)

    def jitter(self, x, scale):
        return x + scale * torch.randn(x.shape, generator=self.noise)

    def training_step(self, batch, batch_idx):
        x, y = batch["labelled"]
        (u,) = batch["unlabelled"]
        with torch.no_grad():
            prob, target = self.net(self.jitter(u, 0.05)).softmax(1).max(1)
        keep = (prob > self.threshold).float()
        sup = F.cross_entropy(self.net(x), y)
        unsup = (F.cross_entropy(self.net(self.jitter(u, 0.5)), target, reduction="none") * keep).mean()
        self.log("kept", keep.mean(), on_step=False, on_epoch=True, sync_dist=True)
        return sup + unsup

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("acc", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch} kept {m['kept']:.3f} acc/0 {m['acc/dataloader_idx_0']:.4f} "
                   f"acc/1 {m['acc/dataloader_idx_1']:.4f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def main():
    L.seed_everything(10)
    train = CombinedLoader({
        "labelled": DataLoader(TensorDataset(*blobs(40, 0)), batch_size=4, shuffle=True),
        "unlabelled": DataLoader(TensorDataset(blobs(200, 1)[0]), batch_size=10, shuffle=True),
    }, mode="max_size_cycle")
    val = [DataLoader(TensorDataset(*blobs(40, 2)), batch_size=10), DataLoader(TensorDataset(*blobs(60, 3)), batch_size=10)]
    trainer = L.Trainer(max_epochs=2, devices=2, accelerator="cpu", strategy="ddp", logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Semi(), train, val)


if __name__ == "__main__":
    main()
