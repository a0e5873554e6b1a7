"""VQ-VAE for 1-D mass spectra; the codebook follows an exponential moving average."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EMACodebook(nn.Module):
    def __init__(self, n_codes=32, dim=8, decay=0.9, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        codes = 0.2 * torch.randn(n_codes, dim)
        self.register_buffer("codes", codes)
        self.register_buffer("cluster_size", torch.ones(n_codes))
        self.register_buffer("code_sum", codes.clone())

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        idx = torch.cdist(flat.detach(), self.codes).argmin(1)
        quantized = F.embedding(idx, self.codes).view_as(z)
        if self.training:
            with torch.no_grad():
                onehot = F.one_hot(idx, self.codes.shape[0]).type_as(flat)
                counts = onehot.sum(0)
                sums = onehot.t() @ flat
                self.cluster_size.mul_(self.decay).add_(counts, alpha=1 - self.decay)
                self.code_sum.mul_(self.decay).add_(sums, alpha=1 - self.decay)
                total = self.cluster_size.sum()
                smoothed = (self.cluster_size + self.eps) / (total + self.eps * len(counts)) * total
                self.codes.copy_(self.code_sum / smoothed.unsqueeze(1))
        commitment = F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), commitment, idx


class SpectraVQVAE(nn.Module):
    def __init__(self, bins=64, tokens=4, dim=8):
        super().__init__()
        self.tokens, self.dim = tokens, dim
        self.encoder = nn.Sequential(nn.Linear(bins, 64), nn.GELU(), nn.Linear(64, tokens * dim))
        self.codebook = EMACodebook(dim=dim)
        self.decoder = nn.Sequential(nn.Linear(tokens * dim, 64), nn.GELU(), nn.Linear(64, bins))

    def forward(self, x):
        z = self.encoder(x).view(-1, self.tokens, self.dim)
        q, commitment, idx = self.codebook(z)
        return self.decoder(q.flatten(1)), commitment, idx


def synthetic_spectra(n=1024, bins=64):
    g = torch.Generator().manual_seed(5)
    centers = torch.randint(4, bins - 4, (12, 3), generator=g).float()
    kind = torch.randint(0, 12, (n,), generator=g)
    grid = torch.arange(bins).float()
    peaks = torch.exp(-0.5 * (grid - centers[kind].unsqueeze(-1)) ** 2 / 2.0).sum(1)
    return peaks + 0.05 * torch.randn(n, bins, generator=g)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    data = TensorDataset(synthetic_spectra())
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = DDP(SpectraVQVAE())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        usage = torch.zeros(32)
        recon_sum = torch.zeros(1)
        for (x,) in loader:
            recon, commitment, idx = model(x)
            recon_loss = F.mse_loss(recon, x)
            opt.zero_grad()
            (recon_loss + 0.25 * commitment).backward()
            opt.step()
            recon_sum += recon_loss.detach()
            usage += torch.bincount(idx, minlength=32)
        dist.all_reduce(recon_sum)
        dist.all_reduce(usage)
        if rank == 0:
            mse = recon_sum.item() / (len(loader) * world)
            print(f"epoch {epoch} recon {mse:.4f} used codes {(usage > 0).sum().item()}", flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(".", "vqvae.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
