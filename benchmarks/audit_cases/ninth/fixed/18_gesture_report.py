"""Gesture recognition from accelerometer traces, with a per-class report after each epoch."""
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassConfusionMatrix

GESTURES = ["circle", "swipe", "shake", "rest"]


def make_traces(n, seed, length=48):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, len(GESTURES), (n,), generator=g)
    t = torch.linspace(0, 6.28, length)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    circle = torch.stack([torch.sin(t + phase), torch.cos(t + phase), torch.zeros(n, length)], 1)
    swipe = torch.stack([torch.tanh(t - phase), torch.zeros(n, length), torch.zeros(n, length)], 1)
    shake = torch.stack([torch.sin(8 * t + phase)] * 3, 1)
    rest = torch.zeros(n, 3, length)
    bank = torch.stack([circle, swipe, shake, rest], 1)
    x = bank[torch.arange(n), y] + 0.7 * torch.randn(n, 3, length, generator=g)
    return TensorDataset(x, y)


class GestureNet(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv1d(3, 24, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(24, 32, 5, padding=2), nn.ReLU(), nn.AdaptiveMaxPool1d(1),
            nn.Flatten(), nn.Linear(32, len(GESTURES)),
        )
        self.confusion = MulticlassConfusionMatrix(num_classes=len(GESTURES))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.confusion.update(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), sync_dist=True)

    def on_validation_epoch_end(self):
        cm = self.confusion.compute().float()
        if self.trainer.is_global_zero:
            recall = cm.diag() / cm.sum(1).clamp(min=1)
            report = "  ".join(f"{name} {r:.2f}" for name, r in zip(GESTURES, recall.tolist()))
            print(f"epoch {self.current_epoch}  {report}", flush=True)
        self.confusion.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main():
    L.seed_everything(13)
    train = DataLoader(make_traces(640, 0), batch_size=32, shuffle=True)
    val = DataLoader(make_traces(160, 1), batch_size=40)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, num_sanity_val_steps=0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(GestureNet(), train, val)
    trainer.print("training finished")


if __name__ == "__main__":
    main()
