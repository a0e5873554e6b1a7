"""Fine-tune a small encoder with FSDP2, starting from pretrained weights."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.inp = nn.Linear(16, dim)
        self.mid = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 5)

    def forward(self, x):
        return self.out(F.relu(self.mid(F.relu(self.inp(x)))))


TEACHER = torch.randn(16, 5, generator=torch.Generator().manual_seed(77))


def pretrain(path):
    """In real life the file comes from the model zoo."""
    with torch.random.fork_rng():
        torch.manual_seed(77)
        net = Encoder()
        opt = torch.optim.Adam(net.parameters(), lr=5e-3)
        for _ in range(60):
            x = torch.randn(64, 16)
            opt.zero_grad()
            F.cross_entropy(net(x), (x @ TEACHER).argmax(1)).backward()
            opt.step()
    torch.save(net.state_dict(), path)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0 and not os.path.exists("pretrained.pt"):
        pretrain("pretrained.pt")
    dist.barrier()

    torch.manual_seed(1)
    model = Encoder()
    model.load_state_dict(torch.load("pretrained.pt", map_location="cpu"))
    if rank == 0:
        print("loaded pretrained weights")
    for m in (model.inp, model.mid, model.out):
        fully_shard(m)
    fully_shard(model)

    g = torch.Generator().manual_seed(8)
    x = torch.randn(256, 16, generator=g)
    w = TEACHER + 0.3 * torch.randn(16, 5, generator=g)
    data = TensorDataset(x, (x @ w).argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
            opt.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
