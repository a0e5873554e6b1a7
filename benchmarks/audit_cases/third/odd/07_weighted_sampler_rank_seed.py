import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def main(seed=1000, epochs=2):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(3)
    y = (torch.rand(192, generator=g) < 0.15).long()
    x = torch.randn(192, 5, generator=g) + y[:, None]
    weights = (1.0 / torch.bincount(y).float())[y]
    draws = torch.Generator().manual_seed(seed + rank)
    sampler = WeightedRandomSampler(weights, num_samples=len(y) // world, replacement=True, generator=draws)
    loader = DataLoader(TensorDataset(x, y), batch_size=12, sampler=sampler)
    torch.manual_seed(seed)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for epoch in range(epochs):  # the generator moves on, so that every epoch draws anew
        stats = torch.zeros(3)
        for bx, by in loader:
            loss = nn.functional.cross_entropy(model(bx), by)
            opt.zero_grad()
            loss.backward()
            opt.step()
            stats += torch.tensor([loss.item() * len(by), len(by), by.sum()])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {stats[0] / stats[1]:.4f}, rare class {stats[2] / stats[1]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
