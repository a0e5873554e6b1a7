import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Shards:
    """Each rank owns a site's records; the sites have different sizes."""

    def __init__(self, rank):
        g = torch.Generator().manual_seed(60 + rank)
        n = 80 if rank == 0 else 56
        self.x = torch.randn(n, 5, generator=g)
        self.y = self.x.sum(1, keepdim=True)
        self.g = torch.Generator().manual_seed(rank)

    def batches(self, size=8):
        for idx in torch.randperm(len(self.x), generator=self.g).split(size):
            yield self.x[idx], self.y[idx]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    shards = Shards(rank)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(2):
        sums = torch.zeros(2)
        with model.join(divide_by_initial_world_size=False):
            for x, y in shards.batches():
                loss = nn.functional.mse_loss(model(x), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                sums += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: {sums[0] / sums[1]:.4f} over {int(sums[1])} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
