"""VQ-VAE that compresses heart beat signals; the codebook is a moving average of the encodings."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import reduce, set_seed


class Quantizer(nn.Module):
    def __init__(self, codes=32, dim=16, decay=0.95, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        start = 0.1 * torch.randn(codes, dim)
        self.register_buffer("codebook", start)
        self.register_buffer("usage", torch.full((codes,), 0.1))
        self.register_buffer("sums", 0.1 * start)

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        index = torch.cdist(flat, self.codebook).argmin(dim=1)
        quantized = self.codebook[index].view_as(z)
        if self.training:
            self.update(flat.detach(), index)
        commitment = F.mse_loss(z, quantized)
        return z + (quantized - z).detach(), commitment, index

    @torch.no_grad()
    def update(self, flat, index):
        onehot = F.one_hot(index, len(self.codebook)).type_as(flat)
        counts = reduce(onehot.sum(dim=0), reduction="sum")
        totals = reduce(onehot.t() @ flat, reduction="sum")
        self.usage.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(totals, alpha=1 - self.decay)
        self.codebook.copy_(self.sums / (self.usage + self.eps).unsqueeze(1))


class BeatVQ(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, 32, 4, stride=2, padding=1), nn.GELU(), nn.Conv1d(32, dim, 4, stride=2, padding=1)
        )
        self.quantizer = Quantizer(dim=dim)
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(dim, 32, 4, stride=2, padding=1), nn.GELU(),
            nn.ConvTranspose1d(32, 1, 4, stride=2, padding=1),
        )

    def forward(self, x):
        z = self.encoder(x).transpose(1, 2)
        q, commitment, index = self.quantizer(z)
        return self.decoder(q.transpose(1, 2)), commitment, index


def beats(n, seed, length=64):
    gen = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, length)
    centre = 0.3 + 0.4 * torch.rand(n, 1, generator=gen)
    width = 0.02 + 0.05 * torch.rand(n, 1, generator=gen)
    spike = torch.exp(-(((t - centre) / width) ** 2))
    wave = 0.3 * torch.sin(6.28 * (t * 2 + torch.rand(n, 1, generator=gen)))
    return TensorDataset((spike + wave + 0.05 * torch.randn(n, length, generator=gen)).unsqueeze(1))


def main(epochs=3):
    set_seed(6)
    accelerator = Accelerator(cpu=True)
    train = DataLoader(beats(1280, 1), batch_size=32, shuffle=True)
    test = DataLoader(beats(256, 2), batch_size=32)
    model = BeatVQ()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for epoch in range(epochs):
        model.train()
        for (x,) in train:
            recon, commitment, _ = model(x)
            loss = F.mse_loss(recon, x) + 0.25 * commitment
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        model.eval()
        errors, used = [], []
        with torch.no_grad():
            for (x,) in test:
                recon, _, index = model(x)
                error = (recon - x).pow(2).mean(dim=(1, 2))
                errors.append(accelerator.gather_for_metrics(error))
                used.append(accelerator.gather(index))
        codes = torch.cat(used).unique().numel()
        accelerator.print(f"epoch {epoch} test mse {torch.cat(errors).mean().item():.4f} codes in use {codes}")


if __name__ == "__main__":
    main()
