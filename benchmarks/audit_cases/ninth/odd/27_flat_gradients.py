"""Turbine fault detection without DDP: one flat gradient vector is averaged by hand, then clipped and centred."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed

CHANNELS, LENGTH = 3, 32


def vibrations(n, seed):
    gen = torch.Generator().manual_seed(seed)
    t = torch.arange(LENGTH).float()
    broken = torch.randint(0, 2, (n,), generator=gen)
    speed = 0.4 + 0.2 * torch.rand(n, CHANNELS, 1, generator=gen)
    signal = torch.sin(speed * t) + 0.6 * torch.randn(n, CHANNELS, LENGTH, generator=gen)
    rattle = 0.8 * torch.sin(2.2 * t) * broken[:, None, None]
    return TensorDataset(signal + rattle, broken)


class VibrationNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv = nn.Conv1d(CHANNELS, width, 7, padding=3)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.conv(x).abs().mean(dim=-1))


def average_gradients(accelerator, params):
    """Every rank calls this once a step, with all parameters, so the vectors fit together."""
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    flat = accelerator.reduce(flat, reduction="mean")
    for p, part in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(part.view_as(p))


def main(epochs=3, batch_size=24):
    accelerator = Accelerator(cpu=True)
    set_seed(40, device_specific=True)
    train_loader = DataLoader(vibrations(1440, 1), batch_size=batch_size, shuffle=True)
    test_loader = DataLoader(vibrations(300, 2), batch_size=50)
    train_loader, test_loader = accelerator.prepare(train_loader, test_loader)

    # the model is not prepared; rank 0's random weights become everybody's weights
    model = VibrationNet()
    params = list(model.parameters())
    with torch.no_grad():
        for p in params:
            p.copy_(broadcast(p.detach().clone(), from_process=0))
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)

    for epoch in range(epochs):
        model.train()
        total = 0.0
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(accelerator, params)
            for p in params:
                if p.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            total += accelerator.reduce(loss.detach(), reduction="mean").item()
        model.eval()
        hits = []
        with torch.no_grad():
            for x, y in test_loader:
                hits.append(accelerator.gather_for_metrics(model(x).argmax(dim=1) == y))
        acc = torch.cat(hits).float().mean().item()
        accelerator.print(f"epoch {epoch}: loss {total / len(train_loader):.4f} accuracy {acc:.3f}")

    if accelerator.is_main_process:
        torch.save(model.state_dict(), "vibration.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
