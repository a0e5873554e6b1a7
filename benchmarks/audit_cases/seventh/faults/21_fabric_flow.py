"""Normalizing flow for sensor readings, trained with Lightning Fabric."""
import math

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DIM = 6


class ActNorm(nn.Module):
    """Per-channel affine layer, set from the statistics of the first batch."""

    def __init__(self, dim):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.zeros(dim))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    @torch.no_grad()
    def initialize(self, x):
        std = x.std(0) + 1e-6
        self.loc.data.copy_(-x.mean(0))
        self.log_scale.data.copy_(-std.log())

    def forward(self, x):
        if self.initialized.item() == 0:
            self.initialize(x)
            self.initialized.fill_(1)
        return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, dim, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(dim // 2, 32), nn.ReLU(), nn.Linear(32, dim))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flip:
            a, b = b, a
        shift, log_s = self.net(a).chunk(2, dim=1)
        log_s = torch.tanh(log_s)
        b = b * log_s.exp() + shift
        out = torch.cat([b, a] if self.flip else [a, b], dim=1)
        return out, log_s.sum(1)


class Flow(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        layers = []
        for k in range(depth):
            layers += [ActNorm(DIM), Coupling(DIM, flip=k % 2 == 1)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        log_det = torch.zeros(len(x), device=x.device)
        for layer in self.layers:
            x, ld = layer(x)
            log_det = log_det + ld
        log_p = -0.5 * (x.square() + math.log(2 * math.pi)).sum(1)
        return -(log_p + log_det).mean()


def readings(n):
    g = torch.Generator().manual_seed(0)
    base = torch.randn(n, DIM, generator=g)
    mix = torch.randn(DIM, DIM, generator=g)
    return TensorDataset(3 + (base @ mix) + 0.5 * base.square())


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(3)
    flow = Flow()
    model, optimizer = fabric.setup(flow, torch.optim.Adam(flow.parameters(), lr=1e-3))
    loader = fabric.setup_dataloaders(DataLoader(readings(2048), batch_size=32, shuffle=True))

    for epoch in range(3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        total = torch.zeros(())
        for (x,) in loader:
            loss = model(x)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            total += loss.detach()
        nll = fabric.all_reduce(total / len(loader), reduce_op="mean")
        fabric.print(f"epoch {epoch} nll {nll:.4f}")
    fabric.save("flow.ckpt", {"model": model})


if __name__ == "__main__":
    main()
