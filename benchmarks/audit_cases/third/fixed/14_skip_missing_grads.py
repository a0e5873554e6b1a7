import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

DOMAINS = ("news", "reviews")


class MultiDomain(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.heads = nn.ModuleDict({d: nn.Linear(32, 3) for d in DOMAINS})

    def forward(self, x, domain):
        return self.heads[domain](self.trunk(x))


def reduce_grads(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def domain_batches(epoch, batch=8):
    """Batches of one domain each, in an order that all ranks agree on; the rank takes every world-th."""
    rng = random.Random(epoch)
    batches = []
    for k, domain in enumerate(DOMAINS):
        g = torch.Generator().manual_seed(50 + k)
        x = torch.randn(64, 10, generator=g)
        y = x[:, k : k + 3].argmax(1)
        for idx in torch.randperm(64, generator=torch.Generator().manual_seed(epoch)).split(batch):
            batches.append((domain, x[idx], y[idx]))
    rng.shuffle(batches)
    return batches[dist.get_rank() :: dist.get_world_size()]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(77)
    model = MultiDomain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        seen = {d: 0 for d in DOMAINS}
        for domain, x, y in domain_batches(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x, domain), y).backward()
            reduce_grads(model)
            optimizer.step()
            seen[domain] += len(x)
        print(f"rank {dist.get_rank()} epoch {epoch}: {seen}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
