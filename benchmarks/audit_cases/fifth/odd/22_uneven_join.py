import torch
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed


def sensor_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 6, generator=g) * 2 - 1
    y = x[:, 0] * x[:, 1] + torch.sin(3 * x[:, 2]) - 0.5 * x[:, 3] ** 2
    return TensorDataset(x, y.unsqueeze(1) + 0.05 * torch.randn(n, 1, generator=g))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)


@torch.no_grad()
def mse(accelerator, model, loader):
    module = accelerator.unwrap_model(model).eval()
    stats = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        stats[0] += (module(x) - y).pow(2).sum()
        stats[1] += len(y)
    module.train()
    stats = accelerator.reduce(stats, reduction="sum")
    return (stats[0] / stats[1]).item(), int(stats[1])


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    set_seed(0)
    train_loader = DataLoader(sensor_data(1000, 0), batch_size=16, shuffle=True)
    val_loader = DataLoader(sensor_data(215, 1), batch_size=32)
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )
    loss_fn = nn.MSELoss()

    for epoch in range(3):
        totals = torch.zeros(2, dtype=torch.float64)
        with Join([model]):
            for x, y in train_loader:
                loss = loss_fn(model(x), y)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                totals[0] += loss.item() * len(y)
                totals[1] += len(y)
        totals = accelerator.reduce(totals, reduction="sum")
        val, n = mse(accelerator, model, val_loader)
        accelerator.print(
            f"epoch {epoch} train {totals[0] / totals[1]:.4f} ({int(totals[1])} rows) val {val:.4f} ({n} rows)"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
