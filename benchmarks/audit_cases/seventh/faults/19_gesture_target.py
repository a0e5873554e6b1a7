"""Gesture classifier from accelerometer traces; stop training once the target loss is reached."""
import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def traces(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    t = torch.linspace(0, 1, 50)
    freq = (y + 1).float().unsqueeze(1) * 3
    x = torch.sin(2 * torch.pi * freq * t) + 1.5 * torch.randn(n, 50, generator=g)
    return TensorDataset(x.unsqueeze(1), y)


class TargetLoss(Callback):
    """Ends the run when the smoothed training loss falls below the target."""

    def __init__(self, target, momentum=0.9):
        self.target = target
        self.momentum = momentum
        self.smoothed = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = float(outputs["loss"])
        if self.smoothed is None:
            self.smoothed = loss
        self.smoothed = self.momentum * self.smoothed + (1 - self.momentum) * loss
        if self.smoothed < self.target:
            trainer.should_stop = True


class GestureNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 16, 7, stride=2), nn.ReLU(),
            nn.Conv1d(16, 16, 5, stride=2), nn.ReLU(),
            nn.Flatten(), nn.LazyLinear(4),
        )
        self.net(torch.zeros(1, 1, 50))
        self.acc = torchmetrics.classification.MulticlassAccuracy(4, average="micro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.acc(self.net(x), y)
        self.log("test_acc", self.acc)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(4)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=20,
        callbacks=[TargetLoss(target=0.3)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = GestureNet()
    trainer.fit(model, DataLoader(traces(1024, 0), batch_size=8, shuffle=True))
    trainer.print(f"stopped after {trainer.global_step} steps")
    trainer.test(model, DataLoader(traces(256, 1), batch_size=32))


if __name__ == "__main__":
    main()
