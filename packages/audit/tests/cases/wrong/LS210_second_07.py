import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--eval-every", type=int, default=30)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--dropout", type=float, default=0.3)
    return p.parse_args()


def make_split(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    return TensorDataset(x, (x[:, :4].sum(1) > x[:, 4:8].sum(1)).long())


def batches(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


@torch.no_grad()
def validate(model, loader):
    model.eval()
    correct = 0
    for x, y in loader:
        correct += (model(x).argmax(1) == y).sum().item()
    return correct / len(loader.dataset)


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(500 + rank)
    train_set = make_split(512, 0)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    val_loader = DataLoader(make_split(200, 1), 100)

    net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(64, 2))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    model.train()
    stream = batches(loader, sampler)
    for step in range(1, args.steps + 1):
        x, y = next(stream)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.eval_every == 0:
            if rank == 0:
                acc = validate(model.module, val_loader)
                print(f"step {step} val acc {acc:.3f}")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
