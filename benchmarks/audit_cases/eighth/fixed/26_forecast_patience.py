"""One-step load forecasting with a GRU; training ends when the validation error stops improving."""
import math

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

WINDOW, MAX_EPOCHS, PATIENCE, MIN_DELTA = 16, 12, 1, 2e-3


def windows(days, seed, spread):
    gen = torch.Generator().manual_seed(seed)
    t = torch.arange(days * 24 + WINDOW).float()
    base = torch.sin(2 * math.pi * t / 24) + 0.4 * torch.sin(2 * math.pi * t / 168)
    noise = torch.linspace(0.02, spread, len(t)) * torch.randn(len(t), generator=gen)
    series = base + noise
    x = series.unfold(0, WINDOW, 1)[: days * 24]
    return TensorDataset(x.unsqueeze(-1), series[WINDOW : WINDOW + days * 24])


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        states, _ = self.rnn(x)
        return self.out(states[:, -1]).squeeze(-1)


def validate(accelerator, model, loader):
    model.eval()
    sq, n = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            sq += ((model(x) - y) ** 2).sum().item()
            n += y.numel()
    sq, n = accelerator.reduce(torch.tensor([sq, n]), reduction="sum").tolist()
    return sq / n


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(8)
    train_loader = DataLoader(windows(24, 1, 0.1), batch_size=24, shuffle=True)
    val_loader = DataLoader(windows(4, 2, 0.9), batch_size=48)
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)
    mse = nn.MSELoss()

    best, waited = float("inf"), 0
    for epoch in range(MAX_EPOCHS):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            accelerator.backward(mse(model(x), y))
            optimizer.step()

        score = validate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: val mse {score:.4f}")
        if score < best - MIN_DELTA:
            best, waited = score, 0
        else:
            waited += 1
        if waited > PATIENCE:
            accelerator.print(f"no progress for {waited} epochs, stopping")
            break

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "forecaster.pt")


if __name__ == "__main__":
    main()
