import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse():
    ap = argparse.ArgumentParser(description="cosine schedule with warmup")
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--warmup", type=float, default=0.1)
    return ap.parse_args()


def warmup_cosine(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, total - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, factor)


def main():
    args = parse()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    x = torch.randn(1024, 16)
    y = torch.sin(x.sum(1, keepdim=True))
    train_set = TensorDataset(x, y)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.bs, sampler=sampler)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total_steps = args.epochs * math.ceil(len(train_set) / args.bs)
    scheduler = warmup_cosine(optimizer, int(args.warmup * total_steps), total_steps)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(1)
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            running += loss.detach()
        dist.all_reduce(running)
        if dist.get_rank() == 0:
            mean = running.item() / (len(loader) * dist.get_world_size())
            print(f"epoch {epoch} loss {mean:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
