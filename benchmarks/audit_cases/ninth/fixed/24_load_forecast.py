"""Hour-ahead electricity load forecast from the previous 24 hours, with early stopping."""
import dataclasses

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed

logger = get_logger(__name__)


@dataclasses.dataclass
class Settings:
    window: int = 24
    hidden: int = 128
    batch_size: int = 16
    lr: float = 5e-3
    max_epochs: int = 40
    patience: int = 2


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def update(self, value):
        if value < self.best:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def load_series(hours, seed):
    rng = np.random.default_rng(seed)
    t = np.arange(hours)
    daily = np.sin(2 * np.pi * t / 24) + 0.4 * np.sin(2 * np.pi * t / 168)
    return (daily + 0.5 * rng.standard_normal(hours)).astype(np.float32)


def windows(series, size):
    x = np.stack([series[i:i + size] for i in range(len(series) - size)])
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(series[size:, None]))


def validation_loss(accelerator, model, loader):
    model.eval()
    errors = []
    with torch.no_grad():
        for x, y in loader:
            errors.append(accelerator.gather_for_metrics((model(x) - y) ** 2))
    return torch.cat(errors).mean().item()


def main():
    cfg = Settings()
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    series = load_series(600, seed=4)
    train_loader = DataLoader(windows(series[:408], cfg.window), cfg.batch_size, shuffle=True)
    val_loader = DataLoader(windows(series[408:], cfg.window), 12)
    model = nn.Sequential(
        nn.Linear(cfg.window, cfg.hidden), nn.ReLU(), nn.Linear(cfg.hidden, cfg.hidden), nn.ReLU(),
        nn.Linear(cfg.hidden, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )
    stopper = EarlyStopping(cfg.patience)

    for epoch in range(cfg.max_epochs):
        model.train()
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        val_loss = validation_loss(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch:02d} val mse {val_loss:.4f}", flush=True)
        if stopper.update(val_loss):
            logger.info("no improvement, stopping")
            break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "forecaster.pt")
    accelerator.print(f"best val mse {stopper.best:.4f}")


if __name__ == "__main__":
    main()
