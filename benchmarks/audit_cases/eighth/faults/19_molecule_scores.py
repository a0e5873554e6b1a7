"""Train a small regressor on fingerprints and write the scores of a screening library to a file."""
import csv

import pytorch_lightning as pl
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Fingerprints(Dataset):
    def __init__(self, n, seed, labelled=True):
        g = torch.Generator().manual_seed(seed)
        self.bits = (torch.rand(n, 128, generator=g) < 0.15).float()
        weight = torch.randn(128, generator=torch.Generator().manual_seed(77))
        self.affinity = self.bits @ weight + 0.2 * torch.randn(n, generator=g)
        self.labelled = labelled

    def __len__(self):
        return len(self.bits)

    def __getitem__(self, i):
        if self.labelled:
            return self.bits[i], self.affinity[i]
        return self.bits[i], i


class AffinityNet(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        bits, y = batch
        return nn.functional.mse_loss(self(bits), y)

    def validation_step(self, batch, batch_idx):
        bits, y = batch
        self.log("val_mse", nn.functional.mse_loss(self(bits), y), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        bits, index = batch
        return index, self(bits)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-2)


def main():
    pl.seed_everything(5)
    model = AffinityNet()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(
        model,
        DataLoader(Fingerprints(1024, 1), batch_size=32, shuffle=True),
        DataLoader(Fingerprints(256, 2), batch_size=32),
    )

    library = DataLoader(Fingerprints(500, 3, labelled=False), batch_size=50)
    outputs = trainer.predict(model, library)
    index = torch.cat([i for i, _ in outputs])
    score = torch.cat([s for _, s in outputs])

    if trainer.is_global_zero:
        ranked = sorted(zip(index.tolist(), score.tolist()), key=lambda row: -row[1])
        with open("scores.csv", "w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(["molecule", "score"])
            writer.writerows(ranked)
        print("best candidates:", ranked[:5], "mean score:", round(score.mean().item(), 4))


if __name__ == "__main__":
    main()
