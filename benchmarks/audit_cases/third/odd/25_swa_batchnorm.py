import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(epochs=3, swa_start=1):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 2))
    model = DDP(net)
    swa = AveragedModel(net)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(160, 6, generator=g)
    y = (x[:, 0] * x[:, 1] > 0).long()
    train = TensorDataset(x[:128], y[:128])
    vx, vy = x[128:], y[128:]
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 8, sampler=sampler)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    swa_schedule = SWALR(opt, swa_lr=0.05, anneal_epochs=1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for bx, by in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(bx), by).backward()
            opt.step()
        if epoch >= swa_start:
            swa.update_parameters(net)
            swa_schedule.step()
    update_bn(DataLoader(train, 16), swa)
    swa.eval()
    with torch.no_grad():
        hits = (swa(vx[rank::world]).argmax(1) == vy[rank::world]).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"SWA accuracy {hits.item() / len(vy):.3f}")
        torch.save(swa.module.state_dict(), "swa.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
