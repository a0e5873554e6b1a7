"""Customer churn model: train, score the scoring base and write submission.csv."""
import csv

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pytorch_lightning as pl


class Customers(Dataset):
    def __init__(self, n, seed, first_id=0):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.arange(first_id, first_id + n)
        self.x = torch.randn(n, 9, generator=g)
        logit = 1.2 * self.x[:, 0] - 0.8 * self.x[:, 4] + self.x[:, 2] * self.x[:, 7]
        self.y = (logit + 0.5 * torch.randn(n, generator=g) > 0).float()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], self.x[i], self.y[i]


class Churn(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 48), nn.ReLU(), nn.Linear(48, 1))
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        _, x, y = batch
        return self.loss(self(x), y)

    def validation_step(self, batch, batch_idx):
        _, x, y = batch
        self.log("val_loss", self.loss(self(x), y), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        ids, x, _ = batch
        return ids, torch.sigmoid(self(x))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main():
    pl.seed_everything(8)
    train = DataLoader(Customers(640, seed=1), batch_size=32, shuffle=True)
    val = DataLoader(Customers(128, seed=2), batch_size=32)
    scoring = DataLoader(Customers(301, seed=3, first_id=10_000), batch_size=32)

    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    model = Churn()
    trainer.fit(model, train, val)

    outputs = trainer.predict(model, scoring)
    scored = [(int(i), float(p)) for ids, probs in outputs for i, p in zip(ids, probs)]
    if trainer.is_global_zero:
        scored.sort()
        with open("submission.csv", "w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(["customer_id", "p_churn"])
            writer.writerows((i, f"{p:.5f}") for i, p in scored)
        rate = sum(p for _, p in scored) / len(scored)
        print(f"mean churn probability {rate:.4f}")
    dist.barrier()


if __name__ == "__main__":
    main()
