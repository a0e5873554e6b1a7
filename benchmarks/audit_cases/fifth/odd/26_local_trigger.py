import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

MAX_EPOCHS = 12
PATIENCE = 2


def noisy_moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.rand(n, generator=g) * torch.pi
    y = torch.randint(0, 2, (n,), generator=g)
    upper = torch.stack([t.cos(), t.sin()], 1)
    lower = torch.stack([1 - t.cos(), 0.5 - t.sin()], 1)
    x = torch.where(y.bool().unsqueeze(1), lower, upper)
    return TensorDataset(x + 0.25 * torch.randn(n, 2, generator=g), y)


@torch.no_grad()
def local_loss(module, loader, loss_fn):
    module.eval()
    total = sum(loss_fn(module(x), y).item() * len(y) for x, y in loader)
    count = sum(len(y) for _, y in loader)
    module.train()
    return total, count


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(13)
    train_loader = DataLoader(noisy_moons(640, 0), batch_size=16, shuffle=True, drop_last=True)
    valid_loader = DataLoader(noisy_moons(256, 1), batch_size=64)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(
        model, optimizer, train_loader, valid_loader
    )
    loss_fn = nn.CrossEntropyLoss()
    module = accelerator.unwrap_model(model)

    best, bad_epochs = float("inf"), 0
    for epoch in range(MAX_EPOCHS):
        for x, y in train_loader:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

        # every process watches its own part of the validation set and may call for the stop
        total, count = local_loss(module, valid_loader, loss_fn)
        if total / count < best - 1e-3:
            best, bad_epochs = total / count, 0
        else:
            bad_epochs += 1
            if bad_epochs >= PATIENCE:
                accelerator.set_trigger()

        sums = accelerator.reduce(torch.tensor([total, count], dtype=torch.float64), reduction="sum")
        accelerator.print(f"epoch {epoch} valid loss {(sums[0] / sums[1]).item():.4f} on {int(sums[1])}")
        if accelerator.check_trigger():
            accelerator.print(f"stopped after epoch {epoch}")
            break

    accelerator.save(module.state_dict(), "moons.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
