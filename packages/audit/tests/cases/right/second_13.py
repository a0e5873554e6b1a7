import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, SWA_START = 6, 3


def spirals(n=600):
    g = torch.Generator().manual_seed(3)
    t = torch.rand(n, generator=g) * 3 + 0.3
    y = torch.arange(n) % 2
    a = 2 * t + 3.1416 * y
    x = torch.stack([t * a.cos(), t * a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)
    return x, y


@torch.no_grad()
def accuracy(net, x, y):
    net.eval()
    hit = (net(x).argmax(1) == y).float().sum()
    net.train()
    return hit


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = spirals()
    train = TensorDataset(x[:480], y[:480])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=24, sampler=sampler)
    net = nn.Sequential(
        nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)
    )
    model = DDP(net)
    swa = AveragedModel(model.module)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    swa_scheduler = SWALR(opt, swa_lr=0.05, anneal_epochs=2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            opt.step()
        if epoch >= SWA_START:
            swa.update_parameters(model.module)
            swa_scheduler.step()

    # the statistics come from the whole training set, in the same order on every rank
    update_bn(DataLoader(train, batch_size=96), swa)
    xv, yv = x[480:][rank::world], y[480:][rank::world]
    hits = torch.stack([accuracy(model.module, xv, yv), accuracy(swa, xv, yv)])
    dist.all_reduce(hits)
    if rank == 0:
        print("last %.3f swa %.3f" % tuple((hits / 120).tolist()))
        torch.save(swa.module.state_dict(), "swa.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
