import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    x = torch.randn(n, 3, 6, 6, generator=g)
    x[torch.arange(n), y] += 0.8
    return TensorDataset(x, y)


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )


@torch.no_grad()
def test(model, loader):
    model.eval()
    good = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return good / len(loader.dataset)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train_set, test_set = images(512, 1), images(200, 2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 16, sampler=sampler)
    test_loader = DataLoader(test_set, 50)

    model = DDP(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: test accuracy {test(model.module, test_loader):.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
