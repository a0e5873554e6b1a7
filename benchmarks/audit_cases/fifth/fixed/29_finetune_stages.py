import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

HEAD_EPOCHS = 1
TOTAL_EPOCHS = 4


class Backbone(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.stem = nn.Conv1d(3, dim, 5, stride=2, padding=2)
        self.block = nn.Sequential(nn.GELU(), nn.Conv1d(dim, dim, 3, padding=1), nn.GELU())

    def forward(self, x):
        h = self.stem(x)
        return (h + self.block(h)).mean(-1)


class Classifier(nn.Module):
    def __init__(self, classes, dim=48):
        super().__init__()
        self.backbone = Backbone(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def accelerometer(n, seed, classes=4):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    t = torch.linspace(0, 6.28, 64)
    phase = 6.28 * torch.rand(n, 3, 1, generator=g)
    freq = (1.0 + y.float()).view(-1, 1, 1) * torch.tensor([1.0, 1.5, 2.0]).view(1, 3, 1)
    x = torch.sin(freq * t + phase) + 0.5 * torch.randn(n, 3, 64, generator=g)
    return TensorDataset(x, y)


@torch.no_grad()
def accuracy(accelerator, model, loader):
    model.eval()
    hit = n = 0
    for x, y in loader:
        pred, y = accelerator.gather_for_metrics((model(x).argmax(1), y))
        hit += (pred == y).sum().item()
        n += len(y)
    model.train()
    return hit / n


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(33)

    train_loader = DataLoader(accelerometer(1024, 0), batch_size=16, shuffle=True, drop_last=True)
    val_loader = DataLoader(accelerometer(250, 1), batch_size=32)

    model = Classifier(classes=4)
    optimizer = torch.optim.AdamW(
        [
            {"params": model.backbone.parameters(), "lr": 0.0},
            {"params": model.head.parameters(), "lr": 5e-3},
        ]
    )
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )

    for epoch in range(TOTAL_EPOCHS):
        if epoch == HEAD_EPOCHS:
            accelerator.print("unfreezing the backbone")
            optimizer.param_groups[0]["lr"] = 2e-3

        running = torch.zeros(1)
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            running += loss.detach()

        loss = accelerator.reduce(running / len(train_loader), reduction="mean").item()
        acc = accuracy(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch} loss {loss:.4f} val acc {acc:.3f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "har.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
