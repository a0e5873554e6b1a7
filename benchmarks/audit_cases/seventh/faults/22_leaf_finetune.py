"""Fine-tune a small convolutional backbone on leaf images: head first, then everything."""
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 5


def leaves(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    grid = torch.linspace(-1, 1, 16)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    angle = (y.float() * 0.6).view(-1, 1, 1)
    stripes = torch.sin(8 * (xx * angle.cos() + yy * angle.sin()))
    x = stripes + 0.8 * torch.randn(n, 16, 16, generator=g)
    return TensorDataset(x.unsqueeze(1), y)


class FeatureUnfreeze(BaseFinetuning):
    """Keeps the backbone frozen for the first epochs."""

    def __init__(self, unfreeze_at=1):
        super().__init__()
        self.unfreeze_at = unfreeze_at

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.unfreeze_at:
            self.unfreeze_and_add_param_group(
                pl_module.backbone, optimizer, lr=1e-3, train_bn=False)


class LeafClassifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 12, 5, stride=2), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.head = nn.Linear(24, CLASSES)
        self.acc = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.acc(self(x), y)
        self.log("val_acc", self.acc)

    def on_train_epoch_end(self):
        acc = self.trainer.callback_metrics["val_acc"]
        n = sum(p.numel() for p in self.parameters() if p.requires_grad)
        self.print(f"epoch {self.current_epoch} trainable {n} val_acc {acc:.3f}")

    def configure_optimizers(self):
        head = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(head, lr=5e-3)


if __name__ == "__main__":
    pl.seed_everything(21)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=4,
        callbacks=[FeatureUnfreeze(unfreeze_at=1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        LeafClassifier(),
        DataLoader(leaves(1024, 0), batch_size=32, shuffle=True),
        DataLoader(leaves(256, 1), batch_size=32),
    )
