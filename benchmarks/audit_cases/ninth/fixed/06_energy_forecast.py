"""Load forecasting: train a GRU, then write the test forecasts to a CSV file and score them."""
import csv

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW = 24


def make_series(hours=1400):
    g = torch.Generator().manual_seed(99)
    t = torch.arange(hours, dtype=torch.float32)
    daily = torch.sin(2 * torch.pi * t / 24)
    weekly = 0.5 * torch.sin(2 * torch.pi * t / 168)
    return daily + weekly + 0.1 * torch.randn(hours, generator=g)


def windows(series):
    x = series.unfold(0, WINDOW, 1)[:-1].unsqueeze(-1)
    y = series[WINDOW:]
    return TensorDataset(x, y)


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h[:, -1]).squeeze(-1)


def fit(model, train_set, epochs=3):
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += torch.tensor([loss.item() * len(y), float(len(y))])
        dist.all_reduce(running)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} train mse {running[0] / running[1]:.4f}")


@torch.no_grad()
def forecast(model, test_set):
    model.eval()
    sampler = DistributedSampler(test_set, shuffle=False)
    loader = DataLoader(test_set, batch_size=50, sampler=sampler)
    preds = torch.cat([model.module(x) for x, _ in loader])
    parts = [torch.empty_like(preds) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, preds)
    return torch.stack(parts, dim=1).reshape(-1)[: len(test_set)]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(8)
    series = make_series()
    split = 1000
    mean, std = series[:split].mean(), series[:split].std()
    series = (series - mean) / std
    train_set = windows(series[:split])
    test_set = windows(series[split - WINDOW :])

    model = DDP(Forecaster())
    fit(model, train_set)
    preds = forecast(model, test_set)

    if dist.get_rank() == 0:
        truth = test_set.tensors[1]
        mae = (preds - truth).abs().mean().item()
        naive = (truth[1:] - truth[:-1]).abs().mean().item()
        print(f"test MAE {mae:.4f} (persistence {naive:.4f}) over {len(preds)} hours")
        with open("forecast.csv", "w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(["hour", "actual", "forecast"])
            for i, (a, p) in enumerate(zip(truth.tolist(), preds.tolist())):
                writer.writerow([split + i, round(a * std.item() + mean.item(), 4), round(p * std.item() + mean.item(), 4)])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
