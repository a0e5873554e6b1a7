"""Vector-quantised autoencoder of short waveforms; the codebook is kept by moving averages."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        freq = 1 + 6 * torch.rand(n, 1, generator=g)
        phase = 2 * math.pi * torch.rand(n, 1, generator=g)
        t = torch.linspace(0, 1, 32)
        self.x = torch.sin(2 * math.pi * freq * t + phase) + 0.05 * torch.randn(n, 32, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


class Codebook(nn.Module):
    def __init__(self, size=32, dim=4, decay=0.95, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        embed = torch.randn(size, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("embed_sum", embed.clone())
        self.register_buffer("usage", torch.ones(size))

    @torch.no_grad()
    def update(self, flat, codes):
        onehot = F.one_hot(codes, len(self.embed)).to(flat.dtype)
        counts = onehot.sum(0)
        sums = onehot.t() @ flat
        self.usage.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.embed_sum.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        total = self.usage.sum()
        smooth = (self.usage + self.eps) / (total + len(self.embed) * self.eps) * total
        self.embed.copy_(self.embed_sum / smooth.unsqueeze(1))

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        codes = torch.cdist(flat.detach(), self.embed).argmin(1)
        quantised = self.embed[codes].view_as(z)
        commit = F.mse_loss(z, quantised)
        if self.training:
            self.update(flat.detach(), codes)
        return z + (quantised - z).detach(), commit


class Codec(nn.Module):
    def __init__(self, frames=4, dim=4):
        super().__init__()
        self.frames, self.dim = frames, dim
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, frames * dim))
        self.codebook = Codebook(dim=dim)
        self.decoder = nn.Sequential(nn.Linear(frames * dim, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        z = self.encoder(x).view(-1, self.frames, self.dim)
        q, commit = self.codebook(z)
        return self.decoder(q.flatten(1)), commit


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(23)
    loader = DataLoader(Waves(1024, 1), batch_size=32, shuffle=True)
    held_out = DataLoader(Waves(256, 2), batch_size=32)
    model = Codec()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)

    for epoch in range(3):
        model.train()
        for x in loader:
            out, commit = model(x)
            loss = F.mse_loss(out, x) + 0.25 * commit
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        errors = []
        with torch.no_grad():
            for x in held_out:
                out, _ = model(x)
                errors.append(accelerator.gather_for_metrics(((out - x) ** 2).mean(1)))
        used = (accelerator.unwrap_model(model).codebook.usage > 0.1).sum().item()
        accelerator.print(f"epoch {epoch}: mse {torch.cat(errors).mean():.4f}, {used} codes in use")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "codec.pt")


if __name__ == "__main__":
    main()
