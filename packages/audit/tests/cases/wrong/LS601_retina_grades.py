import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

torch.set_num_threads(1)
GRADES = 3


class RetinaPatches(Dataset):
    """16x16 patches, the grade is the number of bright spots."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.grade = torch.randint(0, GRADES, (n,), generator=g)
        self.img = 0.45 * torch.randn(n, 1, 16, 16, generator=g)
        for i, k in enumerate(self.grade.tolist()):
            for _ in range(k):
                r, c = torch.randint(0, 13, (2,), generator=g).tolist()
                self.img[i, 0, r:r + 3, c:c + 3] += 1.5

    def __len__(self):
        return len(self.grade)

    def __getitem__(self, i):
        return self.img[i], self.grade[i]


def cnn():
    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(),
                         nn.AvgPool2d(4), nn.Flatten(), nn.Linear(12 * 16, GRADES))


def collect(local):
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    return torch.stack(parts, dim=1).flatten(0, 1)


@torch.no_grad()
def test(net, loader):
    net.eval()
    pred, true = [], []
    for x, y in loader:
        pred.append(net(x).argmax(1))
        true.append(y)
    pred, true = collect(torch.cat(pred)), collect(torch.cat(true))
    table = torch.zeros(GRADES, GRADES, dtype=torch.long)
    for t, p in zip(true.tolist(), pred.tolist()):
        table[t, p] += 1
    acc = table.diag().sum() / table.sum()
    recall = (table.diag() / table.sum(1).clamp(min=1)).tolist()
    return acc.item(), [round(r, 4) for r in recall], table.sum().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(17)
    train, held = RetinaPatches(320, 3), RetinaPatches(37, 4)
    train_sampler = DistributedSampler(train, seed=2)
    train_loader = DataLoader(train, 16, sampler=train_sampler, drop_last=True)
    held_loader = DataLoader(held, 8, sampler=DistributedSampler(held, shuffle=False))
    net = cnn()
    ddp = DDP(net)
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    for epoch in range(4):
        train_sampler.set_epoch(epoch)
        net.train()
        for x, y in train_loader:
            opt.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            opt.step()
        acc, recall, n = test(net, held_loader)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {acc:.4f} recall {recall} ({n} patches)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
