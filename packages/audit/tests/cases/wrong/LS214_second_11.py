import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMA:
    def __init__(self, model, decay=0.97):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


@torch.no_grad()
def validate(net, loader):
    correct = torch.zeros(1)
    count = torch.zeros(1)
    for x, y in loader:
        correct += (net(x).argmax(1) == y).sum()
        count += len(y)
    dist.all_reduce(correct)
    dist.all_reduce(count)
    return (correct / count).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    opt = parser.parse_args()

    dist.init_process_group("gloo")
    is_main = dist.get_rank() == 0
    torch.manual_seed(17)
    w = torch.randn(15, 4)
    x = torch.randn(960, 15)
    y = (x @ w + torch.randn(960, 4)).argmax(1)
    train_set = TensorDataset(x[:640], y[:640])
    val_set = TensorDataset(x[640:], y[640:])
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 16, sampler=sampler)
    val_loader = DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))

    net = nn.Sequential(nn.Linear(15, 32), nn.ReLU(), nn.Linear(32, 4))
    net = DDP(net)
    ema = EMA(net.module)
    optimizer = torch.optim.SGD(net.parameters(), lr=opt.lr, momentum=0.9)
    for epoch in range(opt.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in train_loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(xb), yb).backward()
            optimizer.step()
            if is_main:
                ema.update(net.module)
        acc = validate(ema.module, val_loader)
        if is_main:
            print(f"epoch {epoch}: ema accuracy {acc:.3f}")
            torch.save(ema.module.state_dict(), "ema.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
