"""Tabular regression with early stopping."""
import copy

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class EarlyStopping:
    def __init__(self, patience=2, min_delta=1e-4):
        self.patience = patience
        self.min_delta = min_delta
        self.best = float("inf")
        self.bad_epochs = 0

    def step(self, value):
        if value < self.best - self.min_delta:
            self.best = value
            self.bad_epochs = 0
        else:
            self.bad_epochs += 1
        return self.bad_epochs >= self.patience

    @property
    def improved(self):
        return self.bad_epochs == 0


def build_data():
    g = torch.Generator().manual_seed(2024)
    x = torch.randn(600, 10, generator=g)
    price = 2 * x[:, 0] - x[:, 1] * x[:, 2] + torch.sin(3 * x[:, 3])
    y = price + 1.0 * torch.randn(600, generator=g)
    return random_split(TensorDataset(x, y), [440, 160], generator=g)


def run_validation(model, loader, loss_fn):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            total += loss_fn(model(x).squeeze(-1), y).item() * len(y)
            count += len(y)
    return total / count


def main(max_epochs=60):
    accelerator = Accelerator(cpu=True)
    set_seed(6)

    train_set, val_set = build_data()
    train_loader = DataLoader(train_set, batch_size=20, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=20)
    model = nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )

    loss_fn = nn.MSELoss()
    stopper = EarlyStopping(patience=2)
    best_state = None
    for epoch in range(max_epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x).squeeze(-1), y)
            accelerator.backward(loss)
            optimizer.step()

        val_loss = run_validation(model, val_loader, loss_fn)
        accelerator.print(f"epoch {epoch:02d} val mse {val_loss:.4f}")
        stop = stopper.step(val_loss)
        if stopper.improved:
            best_state = copy.deepcopy(accelerator.unwrap_model(model).state_dict())
        if stop:
            accelerator.print(f"no improvement since {stopper.best:.4f}, stopping at epoch {epoch}")
            break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(best_state, "best.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
