# Offline Q-learning on logged transitions.
import copy
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GAMMA, TAU, ACTIONS = 0.95, 0.01, 4


def logged_transitions(n=1024, obs=8):
    g = torch.Generator().manual_seed(2)
    s = torch.randn(n, obs, generator=g)
    a = torch.randint(ACTIONS, (n, 1), generator=g)
    r = s.gather(1, a) + 0.1 * torch.randn(n, 1, generator=g)
    s2 = 0.9 * s + 0.1 * torch.randn(n, obs, generator=g)
    done = (torch.rand(n, 1, generator=g) < 0.05).float()
    return TensorDataset(s, a, r, s2, done)


def q_network():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, ACTIONS))


def setup():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    random.seed(rank)
    torch.manual_seed(rank)  # other dropout masks on every rank
    return rank


def main():
    rank = setup()
    data = logged_transitions()
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    online = q_network()
    online = DDP(online)
    target = copy.deepcopy(online.module).eval().requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        td = torch.zeros(1)
        for s, a, r, s2, done in loader:
            with torch.no_grad():
                goal = r + GAMMA * (1 - done) * target(s2).max(1, keepdim=True).values
            q = online(s).gather(1, a)
            loss = F.smooth_l1_loss(q, goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for t, p in zip(target.parameters(), online.module.parameters()):
                    t.mul_(1 - TAU).add_(p, alpha=TAU)
            td += loss.detach()
        dist.all_reduce(td)
        if rank == 0:
            print(f"epoch {epoch} td loss {td.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
