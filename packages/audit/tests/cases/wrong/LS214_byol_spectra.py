"""BYOL-style self-supervised pretraining on synthetic spectra."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

DIM, FEAT = 64, 32
TAU = 0.99


def spectra(n=640):
    g = torch.Generator().manual_seed(99)
    pos = torch.rand(n, 3, 1, generator=g) * DIM
    amp = torch.rand(n, 3, 1, generator=g)
    grid = torch.arange(DIM).float()
    return (amp * torch.exp(-((grid - pos) ** 2) / 8)).sum(1)


def augment(x):
    gain = 0.8 + 0.4 * torch.rand(x.size(0), 1, device=x.device)
    return gain * x + 0.05 * torch.randn_like(x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(DIM, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, FEAT))
        self.projector = nn.Sequential(nn.Linear(FEAT, 64), nn.ReLU(), nn.Linear(64, FEAT))

    def forward(self, x):
        return self.projector(self.backbone(x))


class Online(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.predictor = nn.Sequential(nn.Linear(FEAT, 64), nn.ReLU(), nn.Linear(64, FEAT))

    def forward(self, v1, v2):
        return self.predictor(self.encoder(v1)), self.predictor(self.encoder(v2))


@torch.no_grad()
def ema_update(target, source):
    for pt, ps in zip(target.parameters(), source.parameters()):
        pt.mul_(TAU).add_(ps, alpha=1 - TAU)


def byol_loss(p, z):
    return 2 - 2 * F.cosine_similarity(p, z, dim=-1).mean()


def main():
    accelerator = Accelerator(cpu=True)

    encoder = Encoder()
    target = copy.deepcopy(encoder).requires_grad_(False).to(accelerator.device)
    online = Online(encoder)

    optimizer = torch.optim.AdamW(online.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(spectra()), batch_size=32, shuffle=True, drop_last=True)
    online, optimizer, loader = accelerator.prepare(online, optimizer, loader)

    for epoch in range(3):
        losses = []
        for (x,) in loader:
            v1, v2 = augment(x), augment(x)
            p1, p2 = online(v1, v2)
            with torch.no_grad():
                z1, z2 = target(v1), target(v2)
            loss = byol_loss(p1, z2) + byol_loss(p2, z1)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            ema_update(target, accelerator.unwrap_model(online).encoder)
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        accelerator.print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(online).encoder.backbone.state_dict(), "backbone.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
