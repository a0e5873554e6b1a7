"""Train and evaluate with Accelerate."""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_loaders(batch_size):
    g = torch.Generator().manual_seed(8)
    x = torch.randn(512 + 101, 10, generator=g)
    y = (x[:, 0] > x[:, 1]).long()
    train = DataLoader(TensorDataset(x[:512], y[:512]), shuffle=True, batch_size=batch_size)
    valid = DataLoader(TensorDataset(x[512:], y[512:]), shuffle=False, batch_size=batch_size)
    return train, valid


def main(args):
    accelerator = Accelerator(cpu=True)
    set_seed(args.seed)
    train, valid = get_loaders(args.batch_size)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
    for epoch in range(args.epochs):
        model.train()
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        correct = seen = 0
        for x, y in valid:
            with torch.no_grad():
                pred = model(x).argmax(-1)
            pred, ref = accelerator.gather((pred, y))
            correct += (pred == ref).sum().item()
            seen += len(ref)
        accelerator.print(f"epoch {epoch}: accuracy {correct / seen:.4f} on {seen} samples")
    accelerator.end_training()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=42)
    main(p.parse_args())
