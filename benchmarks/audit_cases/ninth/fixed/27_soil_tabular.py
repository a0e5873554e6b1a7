"""Predict soil moisture from a table of sensor readings (CSV written on first use)."""
import csv
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from accelerate import Accelerator
from accelerate.utils import set_seed

CSV = "soil.csv"
FEATURES = 10


def write_table(path, rows=1500):
    rng = np.random.default_rng(2024)
    x = rng.standard_normal((rows, FEATURES))
    w = rng.standard_normal(FEATURES)
    y = np.sin(x @ w) + 0.5 * x[:, 0] * x[:, 1] + 0.3 * rng.standard_normal(rows)
    with open(path, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow([f"s{i}" for i in range(FEATURES)] + ["moisture"])
        writer.writerows(np.column_stack([x, y]).round(5).tolist())


def read_table(path):
    table = np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32)
    return TensorDataset(torch.from_numpy(table[:, :-1]), torch.from_numpy(table[:, -1:]))


class Regressor(nn.Module):
    def __init__(self, width=128, noise=0.1):
        super().__init__()
        self.noise = noise
        self.net = nn.Sequential(
            nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def forward(self, x):
        if self.training:
            x = x + self.noise * torch.randn_like(x)
        return self.net(x)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(42, device_specific=True)

    with accelerator.main_process_first():
        if not os.path.exists(CSV):
            write_table(CSV)
    dataset = read_table(CSV)
    held_out = len(dataset) // 5
    train_set, val_set = random_split(
        dataset, [len(dataset) - held_out, held_out], generator=torch.Generator().manual_seed(42)
    )

    train_loader = DataLoader(train_set, batch_size=20, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=50)
    model = Regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )

    for epoch in range(3):
        model.train()
        losses = []
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        train_mse = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")

        model.eval()
        errors = []
        with torch.no_grad():
            for x, y in val_loader:
                errors.append(accelerator.gather_for_metrics((model(x) - y).square()))
        val_mse = torch.cat(errors).mean()
        accelerator.print(f"epoch {epoch} train {train_mse.item():.4f} val {val_mse.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
