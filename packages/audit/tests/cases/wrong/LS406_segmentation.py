"""Binary segmentation of noisy blobs with a small U-shaped network, large effective batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

SIZE = 24
ACCUM = 4
EPOCHS = 3


def make_blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    centers = torch.randint(6, SIZE - 6, (n, 2), generator=g)
    radii = torch.randint(3, 7, (n, 1, 1), generator=g)
    dist = (yy[None] - centers[:, 0, None, None]) ** 2 + (xx[None] - centers[:, 1, None, None]) ** 2
    mask = (dist <= radii**2).float()
    image = mask + 0.7 * torch.randn(n, SIZE, SIZE, generator=g)
    return TensorDataset(image.unsqueeze(1), mask.unsqueeze(1))


class TinyUNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(3, width), nn.SiLU())
        self.mid = nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.SiLU())
        self.up = nn.Conv2d(3 * width, width, 3, padding=1)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        a = self.down(x)
        b = self.mid(F.max_pool2d(a, 2))
        b = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.head(F.silu(self.up(torch.cat([a, b], 1))))


def dice(logits, target):
    pred = (logits > 0).float()
    inter = (pred * target).sum(dim=(1, 2, 3))
    return (2 * inter + 1) / (pred.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3)) + 1)


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUM)
    set_seed(7)

    train_loader = DataLoader(make_blobs(512, 0), batch_size=8, shuffle=True)
    val_loader = DataLoader(make_blobs(90, 1), batch_size=8)
    model = TinyUNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )

    for epoch in range(EPOCHS):
        model.train()
        running, updates = 0.0, 0
        for image, mask in train_loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                loss = F.binary_cross_entropy_with_logits(model(image), mask)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    updates += 1
                optimizer.step()
            running += loss.item()

        model.eval()
        scores = []
        with torch.no_grad():
            for image, mask in val_loader:
                scores.append(accelerator.gather_for_metrics(dice(model(image), mask)))
        score = torch.cat(scores).mean().item()
        mean_loss = accelerator.reduce(torch.tensor(running / len(train_loader)), reduction="mean")
        accelerator.print(f"epoch {epoch} updates {updates} loss {mean_loss.item():.4f} dice {score:.4f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "unet.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
