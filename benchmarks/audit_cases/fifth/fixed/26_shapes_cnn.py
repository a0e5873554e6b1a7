import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate.utils import set_seed


class Shapes(Dataset):
    """16x16 images with a square, a cross, or a frame."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.images = 0.3 * torch.randn(n, 1, 16, 16, generator=g)
        self.labels = torch.randint(0, 3, (n,), generator=g)
        offsets = torch.randint(0, 9, (n, 2), generator=g)
        for i in range(n):
            r, c = offsets[i].tolist()
            patch = self.images[i, 0, r:r + 7, c:c + 7]
            if self.labels[i] == 0:
                patch += 1.0
            elif self.labels[i] == 1:
                patch[3, :] += 1.5
                patch[:, 3] += 1.5
            else:
                patch[0, :] += 1.5
                patch[-1, :] += 1.5
                patch[:, 0] += 1.5
                patch[:, -1] += 1.5

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(3, 24), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.fc = nn.Linear(24 * 16, 3)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


def train_one_epoch(accelerator, model, loader, optimizer, criterion):
    model.train()
    total = torch.zeros(1)
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = criterion(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
    return accelerator.reduce(total / len(loader), reduction="mean").item()


@torch.no_grad()
def test(accelerator, model, loader):
    model.eval()
    right = count = 0
    for images, labels in loader:
        pred, labels = accelerator.gather_for_metrics((model(images).argmax(1), labels))
        right += (pred == labels).sum().item()
        count += len(labels)
    return right / count


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    set_seed(8)
    device = accelerator.device

    train_loader = DataLoader(Shapes(1024, 0), batch_size=8, shuffle=True, drop_last=True)
    test_loader = DataLoader(Shapes(200, 1), batch_size=32)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for epoch in range(3):
        loss = train_one_epoch(accelerator, model, train_loader, optimizer, criterion)
        acc = test(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: loss {loss:.4f} acc {acc:.3f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "shapes.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
