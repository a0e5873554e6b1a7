"""Predict a plant phenotype from SNP markers (Lightning Fabric)."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning.fabric import Fabric


def genotype_table(n=400, markers=80):
    gen = np.random.default_rng(2024)
    snps = gen.integers(0, 3, size=(n, markers)).astype(np.float32)
    effect = np.zeros(markers, dtype=np.float32)
    effect[gen.choice(markers, 10, replace=False)] = gen.normal(size=10)
    height = snps @ effect + gen.normal(scale=0.7, size=n)
    height = (height - height.mean()) / height.std()
    return TensorDataset(torch.from_numpy(snps - 1.0), torch.from_numpy(height).float())


def split(dataset, val_fraction=0.2):
    order = np.random.default_rng(7).permutation(len(dataset))
    n_val = int(len(dataset) * val_fraction)
    return Subset(dataset, order[n_val:].tolist()), Subset(dataset, order[:n_val].tolist())


class Ridge(nn.Module):
    def __init__(self, markers, hidden=64):
        super().__init__()
        self.linear = nn.Linear(markers, 1)
        self.deep = nn.Sequential(nn.Linear(markers, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, x):
        return (self.linear(x) + self.deep(x)).squeeze(1)


@torch.no_grad()
def evaluate(fabric, model, loader):
    model.eval()
    stats = torch.zeros(2)
    for x, y in loader:
        err = (model(x) - y).square()
        stats += torch.tensor([err.sum().item(), float(len(y))])
    stats = fabric.all_reduce(stats, reduce_op="sum")
    model.train()
    return (stats[0] / stats[1]).item()


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)

    dataset = genotype_table()
    train_set, val_set = split(dataset)
    fabric.print(f"{len(train_set)} training and {len(val_set)} validation plants")

    model = Ridge(markers=80)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    train = fabric.setup_dataloaders(DataLoader(train_set, batch_size=16, shuffle=True))
    val = fabric.setup_dataloaders(DataLoader(val_set, batch_size=20))

    best = float("inf")
    for epoch in range(6):
        for x, y in train:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
        mse = evaluate(fabric, model, val)
        if mse < best:
            best = mse
            fabric.save("best.ckpt", {"model": model, "epoch": epoch})
        fabric.print(f"epoch {epoch}: val mse {mse:.4f}")
    fabric.print(f"best {best:.4f}")


if __name__ == "__main__":
    main()
