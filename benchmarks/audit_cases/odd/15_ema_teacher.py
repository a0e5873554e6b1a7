import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMA:
    def __init__(self, net, decay):
        self.net, self.decay = copy.deepcopy(net).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, net):
        for e, p in zip(self.net.parameters(), net.parameters()):
            e.lerp_(p, 1 - self.decay)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(10, 64), nn.ReLU()).requires_grad_(False)
    net = nn.Sequential(backbone, nn.Linear(64, 4))
    model = DDP(net)
    ema = EMA(model.module, 0.9)
    opt = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)

    g = torch.Generator().manual_seed(3)
    x = torch.randn(640, 10, generator=g)
    y = x[:, :4].argmax(1)
    train, val = TensorDataset(x[:512], y[:512]), TensorDataset(x[512:], y[512:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    vloader = DataLoader(val, batch_size=32, sampler=DistributedSampler(val, shuffle=False))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            opt.step()
            ema.update(model.module)
        counts = torch.zeros(2, dtype=torch.long)
        with torch.no_grad():
            for xb, yb in vloader:
                counts += torch.tensor([(ema.net(xb).argmax(1) == yb).sum().item(), len(yb)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: EMA accuracy {counts[0].item() / counts[1].item():.4f}")
    if rank == 0:
        torch.save(ema.net.state_dict(), "ema.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
