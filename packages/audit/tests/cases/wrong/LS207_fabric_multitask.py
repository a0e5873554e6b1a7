"""Depth and normal estimation from one encoder; the two losses are balanced by learned uncertainties."""
import torch
import torch.nn as nn
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3


def synthetic_scene(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.Generator().manual_seed(99)
    x = torch.randn(n, 32, generator=g)
    depth = (x @ torch.randn(32, 1, generator=w)).tanh() + 0.1 * torch.randn(n, 1, generator=g)
    normal = x @ torch.randn(32, 3, generator=w)
    normal = nn.functional.normalize(normal + 0.5 * torch.randn(n, 3, generator=g), dim=1)
    return TensorDataset(x, depth, normal)


class SceneNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.depth = nn.Linear(width, 1)
        self.normal = nn.Linear(width, 3)

    def forward(self, x):
        h = self.encoder(x)
        return self.depth(h), nn.functional.normalize(self.normal(h), dim=1)


def task_losses(model, batch):
    x, depth, normal = batch
    d, n = model(x)
    return torch.stack([(d - depth).abs().mean(), 1 - (n * normal).sum(1).mean()])


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(3)

    model = SceneNet()
    log_vars = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam(
        [{"params": model.parameters(), "lr": 3e-3}, {"params": [log_vars], "lr": 2e-2}]
    )
    model, optimizer = fabric.setup(model, optimizer)
    train = DataLoader(synthetic_scene(1024, 1), batch_size=16, shuffle=True)
    val = DataLoader(synthetic_scene(256, 2), batch_size=32)
    train, val = fabric.setup_dataloaders(train, val)

    for epoch in range(EPOCHS):
        model.train()
        for batch in train:
            losses = task_losses(model, batch)
            loss = (torch.exp(-log_vars) * losses + log_vars).sum()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()

        model.eval()
        with torch.no_grad():
            total = torch.stack([task_losses(model, batch) for batch in val]).mean(0)
        total = fabric.all_reduce(total, reduce_op="mean")
        fabric.print(f"epoch {epoch}: depth {total[0]:.4f} normal {total[1]:.4f} weights {torch.exp(-log_vars).tolist()}")


if __name__ == "__main__":
    main()
