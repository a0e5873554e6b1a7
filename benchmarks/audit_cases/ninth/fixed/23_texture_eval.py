# Texture recognition with a small conv net; reports the test accuracy after each epoch.
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset
from accelerate import Accelerator
from accelerate.utils import set_seed

EPOCHS = 2
BATCH = 32


class Textures(Dataset):
    """Oriented gratings with noise, sorted by class as on disk."""

    def __init__(self, count, seed, classes=5, size=16):
        gen = torch.Generator().manual_seed(seed)
        axis = torch.arange(size).float()
        yy, xx = torch.meshgrid(axis, axis, indexing="ij")
        images, labels = [], []
        for i in range(count):
            label = i * classes // count
            angle = torch.tensor(3.14159 * label / classes)
            phase = torch.rand(1, generator=gen) * 6.28
            wave = torch.sin((xx * torch.cos(angle) + yy * torch.sin(angle)) * 0.9 + phase)
            images.append((wave + 1.5 * torch.randn(size, size, generator=gen))[None])
            labels.append(label)
        self.images, self.labels = torch.stack(images), torch.tensor(labels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


def build_net(classes=5):
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
    )


def train_epoch(accelerator, net, loader, optimizer):
    net.train()
    criterion = nn.CrossEntropyLoss()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(net(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        total += accelerator.gather(loss.detach()).mean().item()
    return total / len(loader)


@torch.no_grad()
def test(accelerator, net, loader):
    net.eval()
    correct, seen = 0, 0
    for images, labels in loader:
        predictions = net(images).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct += (predictions == labels).sum().item()
        seen += labels.numel()
    return correct / seen


def main():
    set_seed(3)
    accelerator = Accelerator(cpu=True)
    train_loader = DataLoader(Textures(960, seed=10), batch_size=BATCH, shuffle=True)
    test_loader = DataLoader(Textures(203, seed=11), batch_size=BATCH, shuffle=False)
    net = build_net()
    optimizer = optim.Adam(net.parameters(), lr=2e-3)
    net, optimizer, train_loader, test_loader = accelerator.prepare(
        net, optimizer, train_loader, test_loader
    )
    best = 0.0
    for epoch in range(EPOCHS):
        loss = train_epoch(accelerator, net, train_loader, optimizer)
        accuracy = test(accelerator, net, test_loader)
        if accuracy > best:
            best = accuracy
            accelerator.wait_for_everyone()
            accelerator.save(accelerator.unwrap_model(net).state_dict(), "best.pt")
        accelerator.print(f"[{epoch}] loss={loss:.4f} test accuracy={accuracy:.4f} best={best:.4f}")


if __name__ == "__main__":
    main()
