import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

NUM_CLASSES = 6


def dataset():
    g = torch.Generator().manual_seed(66)
    y = torch.randint(0, NUM_CLASSES, (480,), generator=g).sort().values
    x = nn.functional.one_hot(y, NUM_CLASSES).float() + 0.3 * torch.randn(480, NUM_CLASSES, generator=g)
    return TensorDataset(x, y)


def my_part(data, rank, world, seed):
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    return Subset(data, order[rank::world])


def per_class_accuracy(model, loader):
    hits, labels = [], []
    with torch.no_grad():
        for x, y in loader:
            hits.append(y[model(x).argmax(1) == y])
            labels.append(y)
    correct = torch.bincount(torch.cat(hits))
    total = torch.bincount(torch.cat(labels))
    dist.all_reduce(correct)
    dist.all_reduce(total)
    return correct / total.clamp(min=1)


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    data = dataset()
    # the labels are sorted, the last 80 samples are held out in two contiguous parts
    held_out = list(range(200, 240)) + list(range(440, 480))
    train = Subset(data, [i for i in range(480) if i not in set(held_out)])
    val = Subset(data, held_out[rank * 40 : (rank + 1) * 40])
    val_loader = DataLoader(val, batch_size=20)

    model = DDP(nn.Linear(NUM_CLASSES, NUM_CLASSES))
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(3):
        for x, y in DataLoader(my_part(train, rank, world, epoch), batch_size=20):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        acc = per_class_accuracy(model.module, val_loader)
        if rank == 0:
            print(epoch, [round(a, 3) for a in acc.tolist()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
