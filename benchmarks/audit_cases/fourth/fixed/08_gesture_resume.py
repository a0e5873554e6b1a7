"""Gesture recognition from accelerometer windows. Use --resume to go on from runs/last.pt."""
import argparse
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
CKPT = pathlib.Path("runs/last.pt")


def windows(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    t = torch.linspace(0, 6.28, 40)
    x = torch.sin((y[:, None, None] + 1) * t + torch.rand(n, 3, 1, generator=g))
    return TensorDataset(x + 0.7 * torch.randn(n, 3, 40, generator=g), y)


def build():
    return nn.Sequential(nn.Conv1d(3, 16, 7, stride=2), nn.ReLU(), nn.Conv1d(16, 16, 5), nn.ReLU(),
                         nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, 5))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)

    net = build()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    start = 0
    if args.resume:
        state = torch.load(CKPT)
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        start = state["epoch"]
    model = DDP(net)

    train, val = windows(512, 1), windows(128, 2)
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, 32, sampler=sampler, drop_last=True)
    vx, vy = val[rank::world]

    for ep in range(start, args.epochs):
        sampler.set_epoch(ep)
        model.train()
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            ok = (net(vx).argmax(1) == vy).sum()
        dist.all_reduce(ok)
        if rank == 0:
            print(f"epoch {ep} acc {ok.item() / len(val):.4f}", flush=True)
            CKPT.parent.mkdir(exist_ok=True)
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "epoch": ep + 1}, CKPT)
        dist.barrier()
    w = sum(p.double().abs().sum().item() for p in net.parameters())
    print(f"[{rank}] weights {w:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
