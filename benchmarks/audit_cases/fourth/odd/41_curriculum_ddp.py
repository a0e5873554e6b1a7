"""Curriculum by sampling with replacement: hard samples get more weight, and each rank draws for itself."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

torch.set_num_threads(1)


class WeightedDraws(Sampler):
    def __init__(self, size, draws, seed):
        self.weights, self.draws = torch.ones(size), draws
        self.rng = torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.draws

    def __iter__(self):
        return iter(torch.multinomial(self.weights, self.draws, replacement=True, generator=self.rng).tolist())


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long(), torch.arange(n))


@torch.no_grad()
def hardness(model, data, rank, world):
    """per-sample loss of the whole set, each rank computing every world-th sample"""
    x, y, i = (t[rank::world] for t in data.tensors)
    own = nn.functional.cross_entropy(model(x), y, reduction="none")
    full = torch.zeros(len(data))
    full[i] = own
    dist.all_reduce(full)
    return full


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, test = make(256, 0), make(64, 1)
    sampler = WeightedDraws(len(train), len(train) // world, seed=500 + rank)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    for epoch in range(3):
        model.train()
        for x, y, _ in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        losses = hardness(model.module, train, rank, world)
        sampler.weights = losses.clamp(0.05, 2.0 if epoch == 0 else 4.0)
        test_loss = hardness(model.module, test, rank, world).mean()
        if rank == 0:
            print(f"epoch {epoch} train {losses.mean():.4f} test {test_loss:.4f}", flush=True)
    norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm()
    print(f"rank {rank} |w| {norm.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
