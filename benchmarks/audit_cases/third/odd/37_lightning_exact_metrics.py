import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Model(L.LightningModule):
    def __init__(self, train, val):
        super().__init__()
        self.train_set, self.val_set = train, val
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def train_dataloader(self):
        sampler = DistributedSampler(self.train_set, self.trainer.world_size, self.trainer.global_rank, shuffle=True)
        return DataLoader(self.train_set, 8, sampler=sampler)

    def val_dataloader(self):
        mine = range(self.trainer.global_rank, len(self.val_set), self.trainer.world_size)
        return DataLoader(Subset(self.val_set, mine), 8)

    def training_step(self, batch, _):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def on_validation_epoch_start(self):
        self.sums = torch.zeros(3)

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.net(x)
        self.sums += torch.stack([F.cross_entropy(logits, y, reduction="sum"),
                                  (logits.argmax(1) == y).sum().float(), torch.tensor(float(len(y)))])

    def on_validation_epoch_end(self):
        loss, hits, n = self.trainer.strategy.reduce(self.sums, reduce_op="sum")
        self.log("val_loss", loss / n, sync_dist=True)
        self.log("val_acc", hits / n, sync_dist=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), 1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


if __name__ == "__main__":
    L.seed_everything(5)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(133, 8, generator=g)
    y = x[:, :3].argmax(1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
                        use_distributed_sampler=False, num_sanity_val_steps=0, enable_checkpointing=False,
                        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])))
    if trainer.is_global_zero:
        print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})
