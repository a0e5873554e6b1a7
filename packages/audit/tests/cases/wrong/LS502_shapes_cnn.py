"""Small conv net that tells squares, crosses and stripes apart."""
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

CLASSES = ("square", "cross", "stripes")


def draw(n, seed):
    gen = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(n, 1, 16, 16, generator=gen)
    labels = torch.randint(0, len(CLASSES), (n,), generator=gen)
    spots = torch.randint(2, 8, (n, 2), generator=gen)
    for img, label, (r, c) in zip(images, labels, spots.tolist()):
        if label == 0:
            img[0, r : r + 6, c : c + 6] += 1
        elif label == 1:
            img[0, r + 3, c : c + 6] += 1
            img[0, r : r + 6, c + 3] += 1
        else:
            img[0, r : r + 6 : 2, c : c + 6] += 1
    return TensorDataset(images, labels)


def conv_block(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def build_model():
    return nn.Sequential(
        conv_block(1, 8),
        conv_block(8, 16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, len(CLASSES)),
    )


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    table = torch.zeros(len(CLASSES), 2)
    for images, labels in loader:
        right = model(images).argmax(1) == labels
        for k in range(len(CLASSES)):
            mask = labels == k
            table[k] += torch.tensor([right[mask].sum().item(), mask.sum().item()])
    return {name: (hit / n).item() for name, (hit, n) in zip(CLASSES, table)}


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(2)
    train_loader = DataLoader(draw(512, 1), batch_size=32, shuffle=True)
    val_loader = DataLoader(draw(150, 2), batch_size=50)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(3):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        if accelerator.is_main_process:
            report = evaluate(model, val_loader)
            print(f"epoch {epoch}", {k: round(v, 3) for k, v in report.items()})
        accelerator.wait_for_everyone()

    accelerator.save(accelerator.unwrap_model(model).state_dict(), "shapes.pt")


if __name__ == "__main__":
    main()
