"""Day-ahead electricity load forecasting with a small GRU (Accelerate)."""
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

EPOCHS = 4
CONTEXT, HORIZON = 48, 12


def make_windows(n_hours=1600):
    g = torch.Generator().manual_seed(11)
    t = torch.arange(n_hours).float()
    load = torch.sin(2 * math.pi * t / 24) + 0.4 * torch.sin(2 * math.pi * t / 168)
    load = load + 0.05 * torch.randn(n_hours, generator=g)
    windows = load.unfold(0, CONTEXT + HORIZON, 2)
    return windows[:, :CONTEXT].unsqueeze(-1).contiguous(), windows[:, CONTEXT:].contiguous()


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, HORIZON)

    def forward(self, x):
        _, h = self.rnn(x)
        return self.out(h[-1])


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(3)

    x, y = make_windows()
    n_val = 120
    train_loader = DataLoader(TensorDataset(x[:-n_val], y[:-n_val]), batch_size=16, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[-n_val:], y[-n_val:]), batch_size=32)

    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-4)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )

    num_training_steps = EPOCHS * len(train_loader)
    scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=int(0.1 * num_training_steps),
        num_training_steps=num_training_steps,
    )
    scheduler = accelerator.prepare(scheduler)

    loss_fn = nn.MSELoss()
    for epoch in range(EPOCHS):
        model.train()
        for xb, yb in train_loader:
            loss = loss_fn(model(xb), yb)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        errors = []
        with torch.no_grad():
            for xb, yb in val_loader:
                err = (model(xb) - yb).pow(2).mean(dim=1)
                errors.append(accelerator.gather_for_metrics(err))
        rmse = torch.cat(errors).mean().sqrt().item()
        accelerator.print(f"epoch {epoch}: val rmse {rmse:.4f}  lr {scheduler.get_last_lr()[0]:.2e}")

    accelerator.end_training()


if __name__ == "__main__":
    main()
