"""Tiny U-Net on synthetic blobs with Lightning Fabric and gradient accumulation."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 4
EPOCHS = 3


def make_blobs(n, seed, size=24):
    g = torch.Generator().manual_seed(seed)
    grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"), -1).float()
    center = 4 + torch.rand(n, 1, 1, 2, generator=g) * (size - 8)
    radius = 2.5 + 3 * torch.rand(n, 1, 1, generator=g)
    mask = ((grid - center).norm(dim=-1) < radius).float()
    image = mask + 0.3 * torch.randn(n, size, size, generator=g)
    return TensorDataset(image.unsqueeze(1), mask.unsqueeze(1))


class TinyUNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x):
        a = self.down1(x)
        b = self.up(self.down2(a))
        return self.out(torch.cat([a, b], 1))


@torch.no_grad()
def evaluate(fabric, model, loader):
    model.eval()
    counts = torch.zeros(2)
    for image, mask in loader:
        pred = (model(image) > 0).float()
        counts[0] += 2 * (pred * mask).sum()
        counts[1] += pred.sum() + mask.sum()
    counts = fabric.all_reduce(counts, reduce_op="sum")
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(17)

    model = TinyUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    model, optimizer = fabric.setup(model, optimizer)
    train = DataLoader(make_blobs(512, 1), batch_size=4, shuffle=True)
    val = DataLoader(make_blobs(64, 2), batch_size=8)
    train, val = fabric.setup_dataloaders(train, val)

    for epoch in range(EPOCHS):
        if hasattr(train.sampler, "set_epoch"):
            train.sampler.set_epoch(epoch)
        for step, (image, mask) in enumerate(train):
            is_accumulating = (step + 1) % ACCUMULATE != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = F.binary_cross_entropy_with_logits(model(image), mask)
                fabric.backward(loss / ACCUMULATE)
            if (step + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
        dice = evaluate(fabric, model, val)
        fabric.print(f"epoch {epoch}: dice {dice:.4f}")

    fabric.save("unet.ckpt", {"model": model})


if __name__ == "__main__":
    main()
