"""Local SGD: each worker trains on its own bootstrap draws and the weights are averaged every few steps."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 4 * r + y * 2.094 + 0.15 * torch.randn(n, generator=g)
    return torch.stack([r * a.cos(), r * a.sin()], 1), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.seq = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(),
                                 nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x):
        return self.seq(x)


@torch.no_grad()
def average_weights(net, world):
    for t in list(net.parameters()) + [b for b in net.buffers() if b.is_floating_point()]:
        dist.all_reduce(t.data)
        t.data.div_(world)


@torch.no_grad()
def accuracy(net, x, y, rank, world):
    net.eval()
    hit = (net(x[rank::world]).argmax(1) == y[rank::world]).float()
    stat = torch.stack([hit.sum(), torch.tensor(float(len(hit)))])
    dist.all_reduce(stat)
    net.train()
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=20)
    ap.add_argument("--local-steps", type=int, default=8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = spirals(1500, seed=1)
    x_test, y_test = spirals(601, seed=2)
    torch.manual_seed(0)
    model = DDP(Net(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    own = torch.Generator().manual_seed(1234 + rank)
    draws = RandomSampler(TensorDataset(x, y), replacement=True,
                          num_samples=args.rounds * args.local_steps * 32, generator=own)
    loader = iter(DataLoader(TensorDataset(x, y), batch_size=32, sampler=draws))

    for rnd in range(args.rounds):
        with model.no_sync():
            for _ in range(args.local_steps):
                xb, yb = next(loader)
                loss = nn.functional.cross_entropy(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        average_weights(model.module, world)
        if rnd % 5 == 4:
            acc = accuracy(model.module, x_test, y_test, rank, world)
            if rank == 0:
                print(f"round {rnd + 1}: accuracy of the averaged model {acc:.3f}")

    if rank == 0:
        torch.save(model.module.state_dict(), "local_sgd.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
