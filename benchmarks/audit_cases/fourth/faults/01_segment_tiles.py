"""Binary segmentation of round fields in synthetic aerial tiles."""
import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


def make_tiles(n, seed, size=24):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    c = torch.rand(n, 2, generator=g) * size
    r = 3 + 5 * torch.rand(n, generator=g)
    d2 = (yy - c[:, 0, None, None]) ** 2 + (xx - c[:, 1, None, None]) ** 2
    mask = (d2 < (r ** 2)[:, None, None]).float()
    img = 0.6 * mask[:, None] + 0.4 * torch.randn(n, 3, size, size, generator=g)
    return TensorDataset(img, mask[:, None])


class TileNet(nn.Module):
    def __init__(self, w=8):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, w, 3, padding=1), nn.ReLU(),
                                  nn.Conv2d(w, 2 * w, 3, stride=2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * w, w, 2, stride=2)
        self.head = nn.Conv2d(w + 3, 1, 1)

    def forward(self, x):
        return self.head(torch.cat([self.up(self.down(x)).relu(), x], 1))


@torch.no_grad()
def evaluate(net, tiles, rank, world):
    net.eval()
    idx = list(range(rank, len(tiles), world))
    x, y = tiles[idx]
    p = net(x) > 0
    t = torch.stack([(p & (y > 0)).sum(), (p | (y > 0)).sum()]).double()
    dist.all_reduce(t)
    return (t[0] / t[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.01)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    train, val = make_tiles(168, 1), make_tiles(40, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=4, sampler=sampler)
    net = DDP(TileNet())
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for i, (x, y) in enumerate(loader):
            window = min(args.accum, len(loader) - i // args.accum * args.accum)
            sync = (i + 1) % args.accum == 0
            with contextlib.nullcontext() if sync else net.no_sync():
                loss = F.binary_cross_entropy_with_logits(net(x), y) / window
                loss.backward()
            if sync or i + 1 == len(loader):
                opt.step()
                opt.zero_grad()
        iou = evaluate(net.module, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} iou {iou:.4f}", flush=True)
    w = sum(p.double().abs().sum() for p in net.parameters())
    print(f"[{rank}] weights {w.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
