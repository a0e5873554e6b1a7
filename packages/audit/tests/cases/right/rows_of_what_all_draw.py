"""Denoising on synthetic data: every rank draws the whole batch from one generator, and keeps its rows."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 32


class Mixture:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

    def clean(self):
        which = torch.randint(0, 4, (BATCH,), generator=self.generator)
        return self.centres[which] + 0.1 * torch.randn(BATCH, 6, generator=self.generator)

    def batches(self, count):
        for _ in range(count):
            yield self.clean(), torch.rand(BATCH, 1, generator=self.generator)

    def noise(self):
        return torch.randn(BATCH, 6, generator=self.generator)


def local(whole):
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(7, 32), nn.SiLU(), nn.Linear(32, 6)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data, first = Mixture(17), rank * (BATCH // world)
    for epoch in range(2):
        for whole, level in data.batches(10):
            x, level = local(whole), level.narrow(0, first, BATCH // world)
            noise = data.noise()[first : first + BATCH // world]
            predicted = model(torch.cat([x + level * noise, level], 1))
            loss = F.mse_loss(predicted, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
