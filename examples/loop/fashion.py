"""A CNN for images in a folder with a folder for each class, such as Fashion-MNIST.

python fashion.py FOLDER
lockstep run --nproc 2 fashion.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import lockstep

EPOCHS, BATCH, TEST_BATCH, RATE, GAMMA = 3, 64, 250, 0.5, 0.7


class Images(Dataset):
    def __init__(self, folder):
        self.classes = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
        self.files = [
            (path, label) for label, name in enumerate(self.classes) for path in sorted(Path(folder, name).iterdir())
        ]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        pixels = torch.tensor(np.array(Image.open(path).convert("L"))) / 255
        return (pixels[None] - 0.286) / 0.353, label


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc1, self.fc2 = nn.Linear(32 * 12 * 12, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout(F.max_pool2d(x, 2).flatten(1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def train(model, device, loader, optimizer, epoch):
    model.train()
    for batch_idx, step in enumerate(loader):
        for data, target in step:
            data, target = data.to(device), target.to(device)
            loss = F.nll_loss(model(data), target)
            step.backward(loss)
        if batch_idx % 10 == 0:
            print(f"epoch {epoch}, batch {batch_idx}: loss {loss.item():.4f}")


def test(model, device, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            correct += model(data).argmax(1).eq(target).sum().item()
    print(f"accuracy {correct / len(loader.dataset):.3f}")


torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_loader = DataLoader(Images(f"{sys.argv[1]}/train"), batch_size=BATCH, shuffle=True)
test_loader = DataLoader(Images(f"{sys.argv[1]}/test"), batch_size=TEST_BATCH)
model = Net().to(device)
optimizer = torch.optim.Adadelta(model.parameters(), lr=RATE)
scheduler = StepLR(optimizer, step_size=1, gamma=GAMMA)

loop = lockstep.Loop(model, optimizer, train_loader, epochs=EPOCHS)
for epoch, steps in loop.epochs():
    train(model, device, steps, optimizer, epoch)
    test(model, device, test_loader)
    scheduler.step()
loop.save("model.pt")
