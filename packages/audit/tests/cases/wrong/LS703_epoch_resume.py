"""DDP training that can be continued: run once with --epochs 2, then again with --epochs 4 --resume."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CKPT = "last.ckpt"


def get_loader(batch_size):
    g = torch.Generator().manual_seed(99)
    x = torch.randn(448, 12, generator=g)
    y = (x[:, :4].sum(1) > x[:, 4:8].sum(1)).long()
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, seed=2)
    return DataLoader(data, batch_size=batch_size, sampler=sampler), sampler


def save(model, opt, sched, epoch):
    state = {
        "model": model.module.state_dict(),
        "optimizer": opt.state_dict(),
        "scheduler": sched.state_dict(),
        "epoch": epoch,
    }
    torch.save(state, CKPT + ".tmp")
    os.replace(CKPT + ".tmp", CKPT)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(17)

    loader, sampler = get_loader(args.batch_size)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 2))
    start_epoch = 0
    ckpt = None
    if args.resume and os.path.exists(CKPT):
        ckpt = torch.load(CKPT, map_location="cpu")
        model.load_state_dict(ckpt["model"])
        start_epoch = ckpt["epoch"]

    model = DDP(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
    if ckpt is not None:
        opt.load_state_dict(ckpt["optimizer"])
        sched.load_state_dict(ckpt["scheduler"])
        if rank == 0:
            print(f"resumed from {CKPT}, continuing with epoch {start_epoch}")

    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        if rank == 0:
            print(f"epoch {epoch} lr {sched.get_last_lr()[0]:.5f} loss(rank 0) {loss.item():.4f}")
            save(model, opt, sched, epoch)
        dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
