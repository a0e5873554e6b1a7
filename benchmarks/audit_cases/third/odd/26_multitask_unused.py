import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MultiTask(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.heads = nn.ModuleDict({t: nn.Linear(32, n) for t, n in sizes.items()})

    def forward(self, x, task):
        return self.heads[task](self.body(x))


def cycle(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main(steps=30):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = {"colour": 3, "shape": 4, "size": 2}
    model = DDP(MultiTask(sizes), find_unused_parameters=True)
    streams = {}
    for k, (task, n) in enumerate(sizes.items()):
        g = torch.Generator().manual_seed(k)
        x = torch.randn(48 + 16 * k, 8, generator=g)
        ds = TensorDataset(x, x[:, k : k + n].argmax(1))
        sampler = DistributedSampler(ds)
        streams[task] = cycle(DataLoader(ds, 8, sampler=sampler), sampler)
    opt = torch.optim.Adam(model.parameters(), 5e-3)
    choose = random.Random(99)
    for step in range(steps):
        task = choose.choices(list(sizes), weights=[48, 64, 80])[0]
        x, y = next(streams[task])
        loss = nn.functional.cross_entropy(model(x, task), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step} {task}: {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
