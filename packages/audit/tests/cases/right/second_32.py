import pytorch_lightning as L
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class MeanTeacher(L.LightningModule):
    """Semi-supervised: few labelled samples (repeated), many unlabelled ones, and an averaged teacher."""

    def __init__(self, decay=0.97):
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
        self.student, self.teacher = make(), make()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.decay = decay

    def noisy(self, x):
        return x + 0.1 * torch.randn_like(x)

    def training_step(self, batch, _):
        x, y = batch["labelled"]
        (u,) = batch["unlabelled"]
        sup = F.cross_entropy(self.student(self.noisy(x)), y)
        with torch.no_grad():
            target = self.teacher(self.noisy(u)).softmax(-1)
        cons = F.mse_loss(self.student(self.noisy(u)).softmax(-1), target)
        self.log_dict({"sup": sup, "cons": cons}, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(x))
        return sup + cons

    @torch.no_grad()
    def on_train_batch_end(self, *args):
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.lerp_(s, 1 - self.decay)

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch} supervised {m['sup']:.4f} consistency {m['cons']:.5f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.student.parameters(), lr=3e-3)


def main():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(720, 6, generator=g)
    y = (x[:, 0] > 0).long()
    loaders = CombinedLoader(
        {
            "labelled": DataLoader(TensorDataset(x[:80], y[:80]), batch_size=8, shuffle=True),
            "unlabelled": DataLoader(TensorDataset(x[80:]), batch_size=16, shuffle=True),
        },
        mode="max_size_cycle",
    )
    L.seed_everything(0, verbose=False)
    model = MeanTeacher()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    torch.manual_seed(trainer.global_rank)
    trainer.fit(model, loaders)


if __name__ == "__main__":
    main()
