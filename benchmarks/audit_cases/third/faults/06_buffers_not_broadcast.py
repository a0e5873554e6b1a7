import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SmallCNN(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )
        self.fc = nn.Linear(12, classes)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    x = torch.randn(n, 1, 8, 8, generator=g) * (1 + y.view(-1, 1, 1, 1)) + y.view(-1, 1, 1, 1)
    return TensorDataset(x, y)


def loaders(batch=8):
    train, val = images(96, 0), images(64, 1)
    s = DistributedSampler(train)
    v = DistributedSampler(val, shuffle=False)
    return DataLoader(train, batch, sampler=s), s, DataLoader(val, batch, sampler=v)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    train_loader, sampler, val_loader = loaders()
    net = DDP(SmallCNN(), broadcast_buffers=False)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in train_loader:
            opt.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
        net.eval()
        stats = torch.zeros(3)
        with torch.no_grad():
            for x, y in val_loader:
                out = net(x)
                stats += torch.stack([(out.argmax(1) == y).sum().float(), torch.tensor(float(len(y))),
                                      nn.functional.cross_entropy(out, y, reduction="sum")])
        dist.all_reduce(stats)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: acc {stats[0] / stats[1]:.3f} loss {stats[2] / stats[1]:.4f}")
            torch.save(net.module.state_dict(), "cnn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
