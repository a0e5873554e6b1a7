"""Span scorer with DDP. Predictions go to a file which is scored after each epoch."""
import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class SpanData(Dataset):
    def __init__(self, size, seed):
        rng = np.random.RandomState(seed)
        self.start = rng.randint(0, 16, size)
        self.tokens = rng.randint(2, 40, (size, 16))
        self.tokens[np.arange(size), self.start] = rng.randint(0, 2, size)
        self.start = np.where(rng.rand(size) < 0.2, rng.randint(0, 16, size), self.start)

    def __len__(self):
        return len(self.start)

    def __getitem__(self, i):
        return i, torch.from_numpy(self.tokens[i]), int(self.start[i])


class SpanModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(40, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.out = nn.Linear(16, 1)

    def forward(self, tokens):
        h = torch.relu(self.conv(self.emb(tokens).transpose(1, 2))).transpose(1, 2)
        return self.out(h).squeeze(-1)


def predict(model, loader, path):
    model.eval()
    rows = []
    with torch.no_grad():
        for idx, tokens, start in loader:
            rows.append(torch.stack([idx, model(tokens).argmax(1), start], 1))
    np.save(path, torch.cat(rows).numpy())


def score(paths):
    rows = {i: (pred, gold) for path in paths for i, pred, gold in np.load(path)}
    return len(rows), np.mean([pred == gold for pred, gold in rows.values()])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--lr", default=1e-2, type=float)
    parser.add_argument("--out_dir", default="predictions")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_all(12)
    os.makedirs(args.out_dir, exist_ok=True)

    train, dev = SpanData(192, 0), SpanData(60, 1)
    sampler = DistributedSampler(train, shuffle=True, seed=12)
    train_loader = DataLoader(train, batch_size=8, sampler=sampler)
    dev_loader = DataLoader(dev, batch_size=10, sampler=DistributedSampler(dev, shuffle=False))
    model = DDP(SpanModel())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for _, tokens, start in train_loader:
            loss = nn.functional.cross_entropy(model(tokens), start)
            opt.zero_grad()
            loss.backward()
            opt.step()
        out = os.path.join(args.out_dir, f"epoch{epoch}.npy")
        predict(model, dev_loader, out)
        dist.barrier()
        if rank == 0:
            n, em = score([out])
            print(f"epoch {epoch} loss {loss.item():.4f} dev exact match {em:.4f} over {n} questions", flush=True)
        dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
