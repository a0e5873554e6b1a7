"""Fraud detection on card transactions, ROC AUC over the whole validation set after each epoch."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import binary_auroc

import lightning.pytorch as pl


def transactions(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    risk = x[:, 0] * x[:, 1] + 0.8 * x[:, 2] - 1.0
    y = (risk + 0.6 * torch.randn(n, generator=g) > 0).float()
    return TensorDataset(x, y)


class FraudNet(pl.LightningModule):
    def __init__(self, hidden=64, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(16, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        self.scores, self.labels = [], []

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        pos_weight = torch.tensor(3.0, device=self.device)
        return nn.functional.binary_cross_entropy_with_logits(self(x), y, pos_weight=pos_weight)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.scores.append(torch.sigmoid(self(x)))
        self.labels.append(y)

    def on_validation_epoch_end(self):
        scores, labels = torch.cat(self.scores), torch.cat(self.labels)
        self.scores.clear()
        self.labels.clear()
        scores = self.all_gather(scores).flatten()
        labels = self.all_gather(labels).flatten()
        if self.trainer.is_global_zero:
            auc = binary_auroc(scores, labels.int()).item()
            print(f"epoch {self.current_epoch}: AUC {auc:.4f} on {len(labels)} transactions")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    pl.seed_everything(13)
    train = DataLoader(transactions(1024, 1), batch_size=32, shuffle=True)
    val = DataLoader(transactions(256, 2), batch_size=64)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(FraudNet(), train, val)


if __name__ == "__main__":
    main()
