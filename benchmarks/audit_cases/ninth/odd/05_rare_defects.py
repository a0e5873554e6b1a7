"""Surface inspection with 4 percent defects: class-balanced drawing with replacement, dealt over the ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

SIZE, EPOCHS = 12, 4


def plates(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=g) < 0.04).long()
    x = torch.randn(n, 1, SIZE, SIZE, generator=g)
    rows = torch.randint(1, SIZE - 2, (n,), generator=g)
    for i in y.nonzero().flatten().tolist():
        x[i, 0, rows[i] : rows[i] + 2, 2:10] += 2.0
    return TensorDataset(x, y)


class BalancedDistributedSampler(Sampler):
    """All ranks draw the same list (with replacement) and take every world-th entry of it.

    A rare plate can be drawn several times in an epoch, also by both ranks: that is the purpose.
    """

    def __init__(self, labels, total, rank, world, seed=0):
        count = torch.bincount(labels, minlength=2).double()
        self.weights = 1.0 / count[labels]
        self.total = total // world * world
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 10007 + self.epoch)
        drawn = torch.multinomial(self.weights, self.total, replacement=True, generator=g)
        return iter(drawn[self.rank :: self.world].tolist())

    def __len__(self):
        return self.total // self.world


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 12, 3, padding=1)
        self.c2 = nn.Conv2d(12, 24, 3, padding=1)
        self.fc = nn.Linear(24, 2)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        return self.fc(F.relu(self.c2(x)).amax((2, 3)))


@torch.no_grad()
def confusion(model, data, rank, world):
    """Counts over the plates as they come (not balanced), each one scored exactly once."""
    model.eval()
    table = torch.zeros(4, dtype=torch.long)
    for x, y in DataLoader(Subset(data, range(rank, len(data), world)), batch_size=64):
        table += torch.bincount(2 * y + model.module(x).argmax(1), minlength=4)
    dist.all_reduce(table)
    model.train()
    return table.tolist()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    train, test = plates(1500, 1), plates(601, 2)
    sampler = BalancedDistributedSampler(train.tensors[1], 1024, rank, world, seed=5)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = DDP(Detector())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            stats += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(stats)
        tn, fp, fn, tp = confusion(model, test, rank, world)
        if rank == 0:
            recall, precision = tp / max(1, tp + fn), tp / max(1, tp + fp)
            print(f"epoch {epoch} loss {stats[0] / stats[1]:.4f} recall {recall:.3f} precision {precision:.3f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "detector.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
