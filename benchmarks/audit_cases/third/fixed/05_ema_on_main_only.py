import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ModelEMA:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.state_dict().values(), model.state_dict().values()):
            e.mul_(self.decay).add_(p, alpha=1 - self.decay)


def is_main():
    return dist.get_rank() == 0


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 9, generator=g)
    return TensorDataset(x, x[:, :3].argmax(1))


@torch.no_grad()
def evaluate(net, loader):
    counts = torch.zeros(2)
    for x, y in loader:
        counts[0] += (net(x).argmax(1) == y).sum()
        counts[1] += len(y)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    train, test = data(160, 1), data(64, 2)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=8, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(dist.get_rank(), len(test), dist.get_world_size())), batch_size=16)
    model = DDP(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 3)))
    ema = ModelEMA(model.module, args.decay)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model.module)
        acc = evaluate(ema.module, test_loader)
        if is_main():
            print(f"epoch {epoch}: EMA accuracy {acc:.3f}")
    if is_main():
        torch.save(ema.module.state_dict(), "ema.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--decay", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
