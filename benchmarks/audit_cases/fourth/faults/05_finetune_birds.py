import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)


class BirdCalls(Dataset):
    """Fake spectrograms; a species is a bump at a frequency."""

    def __init__(self, n, seed, species=6):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, species, (n,), generator=g)
        f = torch.arange(48).float()
        centre = 4 + 7 * self.y[:, None].float()
        bump = torch.exp(-((f - centre) / 4) ** 2)
        self.x = (bump + 0.8 * torch.randn(n, 48, generator=g))[:, None]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Classifier(nn.Module):
    def __init__(self, species=6):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(1, 12, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
                                      nn.Conv1d(12, 16, 5, padding=2), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(16 * 24, species)

    def forward(self, x):
        return self.head(self.backbone(x))


def accuracy(net, loader):
    good = torch.zeros(2)
    net.eval()
    with torch.no_grad():
        for x, y in loader:
            good += torch.tensor([(net(x).argmax(1) == y).sum(), len(y)])
    net.train()
    dist.all_reduce(good)
    return (good[0] / good[1]).item()


dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(21)
train_set, test_set = BirdCalls(384, 1), BirdCalls(128, 2)
sampler = DistributedSampler(train_set, seed=5)
train_loader = DataLoader(train_set, 16, sampler=sampler, drop_last=True)
test_loader = DataLoader(test_set, 32, sampler=DistributedSampler(test_set, shuffle=False))

net = Classifier()
for p in net.backbone.parameters():
    p.requires_grad_(False)
model = DDP(net)
optimizer = torch.optim.SGD(net.head.parameters(), lr=0.05, momentum=0.9)

WARM, TOTAL = 1, 3
for epoch in range(TOTAL):
    sampler.set_epoch(epoch)
    if epoch == WARM:
        for p in net.backbone.parameters():
            p.requires_grad_(True)
        optimizer.add_param_group({"params": net.backbone.parameters(), "lr": 0.03})
    for x, y in train_loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    acc = accuracy(net, test_loader)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {acc:.3f}", flush=True)

total = sum(p.double().abs().sum().item() for p in net.backbone.parameters())
print(f"rank {rank} backbone {total:.6f}", flush=True)
if rank == 0:
    torch.save(net.state_dict(), "birds.pt")
dist.destroy_process_group()
