"""Transfer learning: train the head for one epoch, then the whole network."""
import pytorch_lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        return torch.relu(self.conv2(x)).mean((2, 3))


class Classifier(L.LightningModule):
    def __init__(self, unfreeze_epoch=1, lr=1e-2, backbone_lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = Backbone()
        self.head = nn.Linear(16, 5)
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == self.hparams.unfreeze_epoch:
            self.backbone.requires_grad_(True)
            self.trainer.print(f"epoch {self.current_epoch}: backbone is trained from here on")

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW([
            {"params": self.head.parameters(), "lr": self.hparams.lr},
            {"params": self.backbone.parameters(), "lr": self.hparams.backbone_lr},
        ])


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    x = torch.rand(n, 3, 12, 12, generator=g)
    for i in range(n):
        x[i, y[i] % 3, ::int(y[i]) + 1] += 0.7
    return TensorDataset(x, y)


def cli():
    L.seed_everything(8)
    model = Classifier()
    trainer = L.Trainer(max_epochs=3, devices=2, accelerator="cpu", strategy="ddp", logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(images(160, 0), batch_size=10, shuffle=True), DataLoader(images(60, 1), batch_size=10))
    norm = sum(p.detach().pow(2).sum() for p in model.backbone.parameters()).sqrt().item()
    m = trainer.callback_metrics
    print(f"[{trainer.global_rank}] loss {m['train_loss']:.4f} val_acc {m['val_acc']:.4f} |backbone| {norm:.6f}", flush=True)


if __name__ == "__main__":
    cli()
