"""Two-stage transfer learning: train the new head first, then fine-tune the whole network."""
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 5
HEAD_EPOCHS, FULL_EPOCHS = 1, 3


def textures(n, seed, size=12):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    xx = torch.arange(size).float()
    freq = 0.4 + 0.35 * y.float()
    phase = 6.28 * torch.rand(n, 1, generator=g)
    row = torch.sin(freq[:, None] * xx + phase)
    img = row[:, None, :].expand(n, size, size) + 0.4 * torch.randn(n, size, size, generator=g)
    return TensorDataset(img.unsqueeze(1), y)


class TextureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(),
        )
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x):
        return self.head(self.backbone(x))


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def accuracy(accelerator, model, loader):
    model.eval()
    hits = []
    with torch.no_grad():
        for x, y in loader:
            hits.append(accelerator.gather_for_metrics(model(x).argmax(1) == y))
    return torch.cat(hits).float().mean().item()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(6)

    train = DataLoader(textures(640, 1), batch_size=16, shuffle=True, drop_last=True)
    test = DataLoader(textures(160, 2), batch_size=16)

    model = TextureNet()
    set_trainable(model.backbone, False)
    optimizer = torch.optim.Adam(
        [
            {"params": model.head.parameters(), "lr": 1e-2},
            {"params": model.backbone.parameters(), "lr": 3e-3},
        ]
    )
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(HEAD_EPOCHS + FULL_EPOCHS):
        if epoch == HEAD_EPOCHS:
            set_trainable(accelerator.unwrap_model(model).backbone, True)
            accelerator.print("fine-tuning the whole network")
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
        acc = accuracy(accelerator, model, test)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}  test accuracy {acc:.3f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "texture_net.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
