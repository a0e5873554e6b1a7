import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    model = torch.compile(DDP(net), backend="eager")
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(128, 8, generator=g)
    ds = TensorDataset(x, x[:, 2:5].argmax(1))
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 8, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            loss = nn.functional.cross_entropy(model(bx), by)
            opt.zero_grad()
            loss.backward()
            opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {mean.item() / dist.get_world_size():.4f}")
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "compiled.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
