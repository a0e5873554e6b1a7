"""River level regression: the main process alone evaluates, and its verdict is broadcast to all ranks."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed

GAUGES = 14
CHECKPOINT = "river_best.pt"


def gauges(n, seed):
    flow = torch.randn(GAUGES, 3, generator=torch.Generator().manual_seed(0)) * 0.5
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, GAUGES, generator=gen)
    level = torch.tanh(x @ flow).sum(dim=1, keepdim=True)
    return TensorDataset(x, level + 0.4 * torch.randn(n, 1, generator=gen))


@torch.no_grad()
def full_error(net, loader):
    """Mean squared error over the whole set, without any communication."""
    net.eval()
    squared, count = 0.0, 0
    for x, y in loader:
        squared += (net(x) - y).pow(2).sum().item()
        count += len(y)
    net.train()
    return squared / count


def main(max_epochs=12, batch_size=16, patience=2):
    set_seed(23)
    accelerator = Accelerator(cpu=True)
    train_loader = DataLoader(gauges(512, 1), batch_size=batch_size, shuffle=True)
    # not prepared on purpose: the main process reads all of it, the other ranks nothing
    val_loader = DataLoader(gauges(333, 2), batch_size=64)
    model = nn.Sequential(nn.Linear(GAUGES, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)

    best, bad = float("inf"), 0
    for epoch in range(max_epochs):
        model.train()
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

        verdict = torch.zeros(1)
        if accelerator.is_main_process:
            # the bare module: DDP's forward would wait for the other rank
            verdict[0] = full_error(accelerator.unwrap_model(model), val_loader)
        error = broadcast(verdict, from_process=0).item()

        # from here on all ranks know the same number and decide the same
        if error < best:
            best, bad = error, 0
            if accelerator.is_main_process:
                torch.save(accelerator.unwrap_model(model).state_dict(), CHECKPOINT)
        else:
            bad += 1
        accelerator.print(f"epoch {epoch:02d} validation mse {error:.4f} (best {best:.4f})")
        if bad > patience:
            accelerator.print("no better for a while, stopping")
            break

    # the file is complete before anybody reads it
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).load_state_dict(torch.load(CHECKPOINT))
    final = torch.zeros(1)
    if accelerator.is_main_process:
        final[0] = full_error(accelerator.unwrap_model(model), val_loader)
    accelerator.print(f"restored model: {broadcast(final).item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
