import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_data(seed=3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(650, 12, generator=g)
    y = (x @ torch.randn(12, 3, generator=g) + torch.randn(650, 3, generator=g)).argmax(1)
    return TensorDataset(x[:512], y[:512]), TensorDataset(x[512:], y[512:])


def evaluate(accelerator, model, loader):
    model.eval()
    correct, total = 0, 0
    for x, y in loader:
        with torch.no_grad():
            pred = model(x).argmax(dim=-1)
        pred, ref = accelerator.gather((pred, y))
        correct += (pred == ref).sum().item()
        total += len(ref)
    model.train()
    return correct / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    train, val = build_data()
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val, batch_size=32)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.num_epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            accelerator.backward(criterion(model(x), y))
            optimizer.step()
        acc = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: accuracy {acc:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
