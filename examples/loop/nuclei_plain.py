"""A U-Net that finds cell nuclei: cross-entropy and Dice loss, clipping, and a rate that falls on a plateau.

python nuclei_plain.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCH, SIZE = 4, 8, 64


class Nuclei(Dataset):
    def __init__(self, folder):
        self.images = sorted(Path(folder, "images").iterdir())
        self.masks = sorted(Path(folder, "masks").iterdir())

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = Image.open(self.images[index]).convert("L").resize((SIZE, SIZE))
        mask = Image.open(self.masks[index]).resize((SIZE, SIZE), Image.NEAREST)
        return torch.tensor(np.array(image))[None] / 255, torch.tensor(np.array(mask) > 0).long()


def double_conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inc, self.down1, self.down2 = (
            double_conv(1, width),
            double_conv(width, 2 * width),
            double_conv(2 * width, 4 * width),
        )
        self.up1, self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.conv1, self.conv2 = double_conv(4 * width, 2 * width), double_conv(2 * width, width)
        self.outc = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x = self.up1(self.down2(F.max_pool2d(x2, 2)))
        x = self.up2(self.conv1(torch.cat([x2, x], 1)))
        return self.outc(self.conv2(torch.cat([x1, x], 1)))


def dice(masks, true_masks):
    common = (masks * true_masks).sum((1, 2))
    return (2 * common + 1e-6) / (masks.sum((1, 2)) + true_masks.sum((1, 2)) + 1e-6)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    scores = [dice(model(x.to(device)).argmax(1).double(), y.to(device).double()) for x, y in loader]
    model.train()
    return torch.cat(scores).mean().item()


torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_loader = DataLoader(Nuclei(f"{sys.argv[1]}/train"), shuffle=True, batch_size=BATCH)
val_loader = DataLoader(Nuclei(f"{sys.argv[1]}/val"), batch_size=BATCH)
model = UNet().to(device)
optimizer = optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
criterion = nn.CrossEntropyLoss()

for epoch in range(EPOCHS):
    epoch_loss = 0
    for images, true_masks in train_loader:
        images, true_masks = images.to(device), true_masks.to(device)
        masks_pred = model(images)
        loss = criterion(masks_pred, true_masks)
        loss += 1 - dice(masks_pred.softmax(1)[:, 1], true_masks).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        epoch_loss += loss.item()
    val_score = evaluate(model, val_loader, device)
    scheduler.step(val_score)
    print(f"epoch {epoch}: loss {epoch_loss / len(train_loader):.3f}, Dice {val_score:.3f}")
torch.save(model.state_dict(), "model.pt")
