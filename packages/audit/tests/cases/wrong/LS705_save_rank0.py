"""Train a sharded model and export the weights."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def export(model, path):
    weights = {name: p.to_local().detach().clone() for name, p in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(weights, path)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(256, 10, generator=g)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
    export(model, "model.pt")
    if dist.get_rank() == 0:
        print("exported", sum(t.numel() for t in torch.load("model.pt").values()), "numbers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
