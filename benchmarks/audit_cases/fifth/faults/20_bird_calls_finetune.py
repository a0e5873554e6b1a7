"""Fine-tune an audio encoder on bird calls: train the classifier first, then the encoder as well."""
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pytorch_lightning as pl

SPECIES = 6


def spectrograms(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, SPECIES, (n,), generator=g)
    t = torch.arange(32) / 32
    f = torch.arange(16).unsqueeze(1)
    maps = []
    for c in y.tolist():
        track = 8 + 5 * torch.sin(2 * math.pi * (1 + c % 3) * t + (c // 3) * 1.5)
        maps.append(torch.exp(-0.5 * (f - track) ** 2))
    x = torch.stack(maps) + 0.4 * torch.randn(n, 16, 32, generator=g)
    return TensorDataset(x.unsqueeze(1), y)


def pretrained_encoder():
    torch.manual_seed(99)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(),
    )


class CallClassifier(pl.LightningModule):
    def __init__(self, unfreeze_at=1, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = pretrained_encoder()
        self.classifier = nn.Linear(16 * 4 * 8, SPECIES)
        for p in self.encoder.parameters():
            p.requires_grad = False

    def forward(self, x):
        return self.classifier(self.encoder(x))

    def on_train_epoch_start(self):
        if self.current_epoch == self.hparams.unfreeze_at:
            for p in self.encoder.parameters():
                p.requires_grad = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD([
            {"params": self.classifier.parameters()},
            {"params": self.encoder.parameters(), "lr": 0.4 * self.hparams.lr},
        ], lr=self.hparams.lr)


if __name__ == "__main__":
    pl.seed_everything(2)
    train = DataLoader(spectrograms(384, 1), batch_size=16, shuffle=True)
    val = DataLoader(spectrograms(96, 2), batch_size=24)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    model = CallClassifier()
    trainer.fit(model, train, val)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "bird_calls.pt")
        print("val_acc", float(trainer.callback_metrics["val_acc"]))
