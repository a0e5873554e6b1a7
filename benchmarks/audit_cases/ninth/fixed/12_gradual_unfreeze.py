"""Texture classification: warm up a new head on a backbone, then train the whole network."""
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    grid = torch.arange(16).float()
    freq = 0.4 + 0.4 * y.float()
    wave = torch.sin(freq[:, None] * grid[None, :])
    x = wave[:, None, :, None] + wave[:, None, None, :]
    x = x + 0.6 * torch.randn(n, 1, 16, 16, generator=g)
    return TensorDataset(x, y)


class Backbone(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )


class TextureNet(pl.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.lr = lr
        self.backbone = Backbone()
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        acc = (self(x).argmax(1) == y).float().mean()
        self.log("val_acc", acc, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam([
            {"params": self.head.parameters(), "lr": self.lr},
            {"params": self.backbone.parameters(), "lr": 0.0},
        ])


class UnfreezeBackbone(Callback):
    """Holds the backbone still (learning rate 0) until its epoch, so that DDP knows all parameters from the start."""

    def __init__(self, unfreeze_at_epoch=1, backbone_lr=5e-4):
        super().__init__()
        self.unfreeze_at_epoch = unfreeze_at_epoch
        self.backbone_lr = backbone_lr

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.unfreeze_at_epoch:
            trainer.optimizers[0].param_groups[1]["lr"] = self.backbone_lr


def main():
    pl.seed_everything(11)
    train = DataLoader(make_textures(512, 0), batch_size=32, shuffle=True)
    val = DataLoader(make_textures(128, 1), batch_size=32)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=4,
        callbacks=[UnfreezeBackbone()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    model = TextureNet()
    trainer.fit(model, train, val)
    if trainer.is_global_zero:
        print(f"val acc {trainer.callback_metrics['val_acc']:.3f}")
        torch.save(model.state_dict(), "texture_net.pt")


if __name__ == "__main__":
    main()
