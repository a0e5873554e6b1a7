"""Fine-tuning of a small audio classifier: the head first, then the backbone too."""
import math

import lightning as L
import torch
import torch.nn as nn
from lightning.pytorch.callbacks import BackboneFinetuning
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

N_CLASSES = 5


def tones(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, N_CLASSES, (n,), generator=g)
    t = torch.linspace(0, 1, 128)
    pitch = 4.0 + 3.0 * label.float().unsqueeze(1) + 0.4 * torch.randn(n, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    wave = torch.sin(2 * math.pi * pitch * t + phase) + 0.5 * torch.randn(n, 128, generator=g)
    return TensorDataset(wave.unsqueeze(1), label)


def make_backbone():
    return nn.Sequential(
        nn.Conv1d(1, 16, 9, stride=2, padding=4), nn.ReLU(),
        nn.Conv1d(16, 32, 9, stride=2, padding=4), nn.ReLU(),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(),
    )


class ToneClassifier(L.LightningModule):
    def __init__(self, lr=5e-3):
        super().__init__()
        self.lr = lr
        self.backbone = make_backbone()
        self.head = nn.Linear(128, N_CLASSES)
        self.val_acc = MulticlassAccuracy(N_CLASSES, average="micro")

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_acc(self(x), y)
        self.log("val_acc", self.val_acc)

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def main():
    L.seed_everything(13)
    finetune = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.2, lambda_func=lambda epoch: 1.0
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, callbacks=[finetune],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(
        ToneClassifier(),
        DataLoader(tones(1024, 1), batch_size=16, shuffle=True),
        DataLoader(tones(256, 2), batch_size=32),
    )
    if trainer.is_global_zero:
        print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
