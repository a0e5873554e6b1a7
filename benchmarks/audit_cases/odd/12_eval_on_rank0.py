import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    right = total = 0
    for x, y in loader:
        right += (net(x).argmax(1) == y).sum().item()
        total += len(y)
    net.train()
    return right / total


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(600, 6, generator=g)
    y = (x[:, 0] * x[:, 1] > 0).long()
    train, val = TensorDataset(x[:512], y[:512]), TensorDataset(x[512:], y[512:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    best = 0.0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            opt.step()
        acc = torch.zeros(1)
        if rank == 0:
            acc[0] = accuracy(model.module, DataLoader(val, batch_size=44))
        dist.broadcast(acc, src=0)
        if acc.item() > best:
            best = acc.item()
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
                print(f"epoch {epoch}: new best {best:.4f}")
        if best > 0.99:
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
