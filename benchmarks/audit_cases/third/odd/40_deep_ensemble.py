import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def train_member(ds, seed, epochs):
    torch.manual_seed(seed)
    member = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3))
    bootstrap = RandomSampler(ds, replacement=True, generator=torch.Generator().manual_seed(seed))
    loader = DataLoader(ds, batch_size=8, sampler=bootstrap)
    opt = torch.optim.Adam(member.parameters(), 1e-2)
    for _ in range(epochs):
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(member(x), y).backward()
            opt.step()
    return member.eval()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(140, 6, generator=g)
    y = x[:, :3].argmax(1)
    member = train_member(TensorDataset(x[:96], y[:96]), seed=70 + rank, epochs=args.epochs)
    with torch.no_grad():
        probs = member(x[96:]).softmax(1)
    own = (probs.argmax(1) == y[96:]).float().mean().item()
    dist.all_reduce(probs)
    ensemble = ((probs / world).argmax(1) == y[96:]).float().mean().item()
    print(f"member {rank}: {own:.3f}")
    if rank == 0:
        print(f"ensemble: {ensemble:.3f}")
    torch.save(member.state_dict(), f"member-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
