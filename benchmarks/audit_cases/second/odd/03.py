import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# Local SGD: every rank trains alone and the weights are averaged each H steps.
H = 8


@torch.no_grad()
def average_parameters(model):
    flat = torch.nn.utils.parameters_to_vector(model.parameters())
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    torch.nn.utils.vector_to_parameters(flat, model.parameters())


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    g = torch.Generator().manual_seed(12)
    x = torch.randn(1024, 10, generator=g)
    y = (x @ torch.randn(10, 3, generator=g)).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % H == 0:
                average_parameters(model)
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.4f}")

    average_parameters(model)
    if rank == 0:
        torch.save(model.state_dict(), "local_sgd.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
