import lightning as L
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

TARGETS = ["age", "income", "score"]


def table(n=480):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, 9, generator=g)
    y = torch.stack([x[:, 0] * 2, x[:, 1] - x[:, 2], x[:, 3].abs()], 1)
    return TensorDataset(x, y + 0.1 * torch.randn(n, 3, generator=g))


class MultiTarget(L.LightningModule):
    def __init__(self, hidden=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(hidden, 1) for _ in TARGETS)

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([head(h) for head in self.heads], dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = F.mse_loss(self(x), y, reduction="none").mean(0)
        for name, value in zip(TARGETS, losses):
            self.log(f"mse/{name}", value, on_step=False, on_epoch=True, sync_dist=True)
        return losses.sum()

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        self.print(self.current_epoch, {t: round(m[f"mse/{t}"].item(), 3) for t in TARGETS})

    def configure_optimizers(self):
        params = [
            {"params": self.trunk.parameters(), "lr": 2e-3},
            {"params": [p for head in self.heads for p in head.parameters()], "lr": 1e-2},
        ]
        return optim.Adam(params)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(MultiTarget(), DataLoader(table(), batch_size=16, shuffle=True))
