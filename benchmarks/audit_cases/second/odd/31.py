import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class FineTune(L.LightningModule):
    """Frozen backbone in eval mode, a new head, and low learning rate for the last backbone layer."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(16, 3))
        self.backbone[:-1].requires_grad_(False)

    def on_train_epoch_start(self):
        self.backbone.eval()

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, _):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch} loss {self.trainer.callback_metrics['loss']:.4f}")

    def configure_optimizers(self):
        groups = [
            {"params": self.backbone[-1].parameters(), "lr": 1e-4},
            {"params": self.head.parameters()},
        ]
        opt = torch.optim.AdamW(groups, lr=1e-2)
        sched = torch.optim.lr_scheduler.OneCycleLR(
            opt, max_lr=[1e-4, 1e-2], total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [opt], [{"scheduler": sched, "interval": "step"}]


def main():
    L.seed_everything(42, verbose=False)
    x = torch.randn(400, 12)
    y = (x[:, :3] - x[:, 3:6]).argmax(1)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", gradient_clip_val=1.0, accumulate_grad_batches=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(FineTune(), DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True))


if __name__ == "__main__":
    main()
