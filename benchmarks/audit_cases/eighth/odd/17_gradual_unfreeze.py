"""Fine-tuning from the top down: a block joins the training with every epoch."""
import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


def stripes(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 4, (n,), generator=g)
    x = torch.randn(n, 1, 12, 12, generator=g)
    for k in range(4):
        rows = slice(None, None, 2 + k % 2)
        if k < 2:
            x[label == k, :, rows, :] += 1.0
        else:
            x[label == k, :, :, rows] += 1.0
    return TensorDataset(x, label)


class StripeNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([
            nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
            nn.Linear(24 * 36, 4),
        ])
        self.val_acc = MulticlassAccuracy(4, average="micro")

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def resting(self):
        """Blocks that do not learn yet; their turn comes one epoch after the block above them."""
        return self.blocks[: max(0, len(self.blocks) - 1 - self.current_epoch)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        for block in self.resting():
            for p in block.parameters():
                p.grad = None

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_acc(self(x), y)
        self.log("val_acc", self.val_acc)

    def configure_optimizers(self):
        groups = [
            {"params": block.parameters(), "lr": 3e-3 * 0.5 ** depth}
            for depth, block in enumerate(reversed(self.blocks))
        ]
        return torch.optim.AdamW(groups, weight_decay=1e-3)


def main():
    L.seed_everything(19)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(
        StripeNet(),
        DataLoader(stripes(768, 1), batch_size=16, shuffle=True),
        DataLoader(stripes(256, 2), batch_size=32),
    )
    if trainer.is_global_zero:
        print({k: round(v.item(), 4) for k, v in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
