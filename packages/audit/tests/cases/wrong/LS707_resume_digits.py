"""Segment-display digit classifier that can be continued from its last checkpoint."""
import argparse
import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

SEGMENTS = ["1110111", "0010010", "1011101", "1011011", "0111010",
            "1101011", "1101111", "1010010", "1111111", "1111011"]


def display_readings(n, seed):
    gen = torch.Generator().manual_seed(seed)
    patterns = torch.tensor([[float(c) for c in s] for s in SEGMENTS])
    digits = torch.randint(0, 10, (n,), generator=gen)
    mix = torch.randn(7, 40, generator=torch.Generator().manual_seed(0))
    pixels = patterns[digits] @ mix + 1.2 * torch.randn(n, 40, generator=gen)
    return TensorDataset(pixels, digits)


def build_model():
    return nn.Sequential(nn.Linear(40, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))


@torch.no_grad()
def accuracy(accelerator, model, loader):
    model.eval()
    hits = []
    for pixels, digits in loader:
        hits.append(accelerator.gather_for_metrics(model(pixels).argmax(1) == digits))
    return torch.cat(hits).float().mean().item()


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", default="checkpoints/last")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main():
    args = parse()
    accelerator = Accelerator(cpu=True)
    set_seed(11)

    train_loader = DataLoader(display_readings(1600, 1), batch_size=40, shuffle=True)
    test_loader = DataLoader(display_readings(400, 2), batch_size=40)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    first_epoch = 0
    if args.resume:
        accelerator.load_state(args.out)
        with open(os.path.join(args.out, "progress.json")) as f:
            first_epoch = json.load(f)["epoch"] + 1
        accelerator.print(f"resuming at epoch {first_epoch}")

    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    for epoch in range(first_epoch, args.epochs):
        model.train()
        total = 0.0
        for pixels, digits in train_loader:
            loss = nn.functional.cross_entropy(model(pixels), digits)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += accelerator.reduce(loss.detach(), reduction="mean").item()
        acc = accuracy(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch} loss {total / len(train_loader):.4f} accuracy {acc:.3f}")

        accelerator.save_state(args.out)
        if accelerator.is_main_process:
            with open(os.path.join(args.out, "progress.json"), "w") as f:
                json.dump({"epoch": epoch}, f)
        accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
