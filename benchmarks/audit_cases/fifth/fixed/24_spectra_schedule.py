"""Predict concentrations from synthetic absorption spectra."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

from accelerate import Accelerator
from accelerate.utils import set_seed

BANDS, SUBSTANCES = 80, 5


def spectra(n, seed):
    g = torch.Generator().manual_seed(seed)
    conc = torch.rand(n, SUBSTANCES, generator=g)
    grid = torch.linspace(0, 1, BANDS)
    centers = torch.linspace(0.15, 0.85, SUBSTANCES).unsqueeze(1)
    peaks = torch.exp(-((grid - centers) ** 2) / 0.012)
    absorbance = conc @ peaks
    transmission = torch.exp(-1.5 * absorbance)
    return TensorDataset(transmission + 0.01 * torch.randn(n, BANDS, generator=g), conc)


class SpectraNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embed = nn.Linear(BANDS, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(2)
        )
        self.out = nn.Linear(width, SUBSTANCES)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


@torch.no_grad()
def rmse(accelerator, model, loader):
    model.eval()
    errors = []
    for x, y in loader:
        err = (model(x) - y).pow(2).mean(dim=1)
        errors.append(accelerator.gather_for_metrics(err))
    model.train()
    errors = torch.cat(errors)
    return errors.mean().sqrt().item(), len(errors)


def main(epochs=4, batch_size=16, lr=1e-3):
    accelerator = Accelerator(cpu=True)
    set_seed(42)

    train_loader = DataLoader(spectra(1536, 0), batch_size=batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(spectra(300, 1), batch_size=64)
    model = SpectraNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    num_training_steps = epochs * len(train_loader) * accelerator.num_processes
    scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=num_training_steps // 10,
        num_training_steps=num_training_steps,
    )
    scheduler = accelerator.prepare(scheduler)
    loss_fn = nn.MSELoss()

    for epoch in range(epochs):
        for x, y in train_loader:
            loss = loss_fn(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        error, n = rmse(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch} test rmse {error:.4f} on {n} spectra")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "spectra.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
