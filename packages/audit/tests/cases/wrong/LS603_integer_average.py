"""XOR-like classification, with averaged validation numbers."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def reduce_mean(value):
    """Average a tensor over all processes."""
    out = value.clone()
    dist.all_reduce(out, op=dist.ReduceOp.SUM)
    out //= dist.get_world_size()
    return out


@torch.no_grad()
def validate(model, loader):
    model.eval()
    percents = torch.zeros(0, dtype=torch.long)
    losses = []
    for x, y in loader:
        out = model.module(x)
        losses.append(nn.functional.cross_entropy(out, y))
        hit = (out.argmax(1) == y).sum()
        percents = torch.cat([percents, hit.view(1)])
    model.train()
    correct = percents.sum()
    return reduce_mean(torch.stack(losses).mean()), reduce_mean(correct)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(10)
    g = torch.Generator().manual_seed(10)
    x = torch.rand(608, 2, generator=g) * 2 - 1
    y = ((x[:, 0] > 0) ^ (x[:, 1] > 0)).long()
    train, val = TensorDataset(x[:512], y[:512]), TensorDataset(x[512:], y[512:])
    sampler = DistributedSampler(train, seed=1)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    val_loader = DataLoader(val, batch_size=16, sampler=DistributedSampler(val, shuffle=False))

    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            optimizer.step()
        loss, correct = validate(model, val_loader)
        if rank == 0:
            share = correct.item() / (len(val) / dist.get_world_size())
            print(f"epoch {epoch}: val loss {loss.item():.4f}, accuracy {share:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
