import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CONFIG = {"epochs": 3, "batch_size": 8, "lr": 0.05, "warmup": 0.1}


def cosine_with_warmup(optimizer, warmup_steps, total_steps):
    def factor(step):
        if step < warmup_steps:
            return (step + 1) / max(1, warmup_steps)
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, factor)


def build(cfg):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(128, 8, generator=g)
    dataset = TensorDataset(x, (x[:, 0] - x[:, 1] > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=cfg["batch_size"], sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9)
    steps_per_epoch = math.ceil(len(dataset) / cfg["batch_size"])
    total = cfg["epochs"] * steps_per_epoch
    scheduler = cosine_with_warmup(optimizer, int(cfg["warmup"] * total), total)
    return loader, sampler, model, optimizer, scheduler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    loader, sampler, model, optimizer, scheduler = build(CONFIG)
    for epoch in range(CONFIG["epochs"]):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} last loss {mean / dist.get_world_size():.4f} lr {scheduler.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
