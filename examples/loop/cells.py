"""A ResNet for small colour images of three kinds of blood cells; the weights of the best epoch are kept.

python cells.py FOLDER
lockstep run --nproc 2 cells.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lockstep

CLASSES = ["Platelets", "RBC", "WBC"]
EPOCHS, BATCH, SIZE = 6, 32, 32


class Cells(Dataset):
    def __init__(self, folder, augment):
        self.files = [
            (path, label) for label, name in enumerate(CLASSES) for path in sorted(Path(folder, name).iterdir())
        ]
        self.augment = augment

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, label = self.files[index]
        image = torch.tensor(np.array(Image.open(path).convert("RGB").resize((SIZE, SIZE)))).permute(2, 0, 1) / 255
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return (image - 0.5) / 0.25, label


class Block(nn.Module):
    def __init__(self, inputs, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, planes), nn.GroupNorm(4, planes)
        self.shortcut = nn.Conv2d(inputs, planes, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(4, width), nn.ReLU())
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )  # fmt: skip
        self.head = nn.Linear(4 * width, len(CLASSES))

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
trainloader = DataLoader(Cells(f"{sys.argv[1]}/train", augment=True), batch_size=BATCH, shuffle=True)
testloader = DataLoader(Cells(f"{sys.argv[1]}/val", augment=False), batch_size=100)
net = ResNet().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)

loop = lockstep.Loop(net, optimizer, trainloader, epochs=EPOCHS)
for epoch, steps in loop.epochs():
    net.train()
    for step in steps:
        for inputs, targets in step:
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = net(inputs)
            loss = criterion(outputs, targets)
            step.backward(loss)
    net.eval()
    correct = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            correct += net(inputs.to(device)).argmax(1).eq(targets.to(device)).sum().item()
    acc = correct / len(testloader.dataset)
    print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {acc:.3f}")
    loop.save("best.pt", if_best=acc)
    scheduler.step()
loop.save("model.pt")
