"""VQ-VAE on texture patches; the codebook is learned by exponential moving averages."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EMAQuantizer(nn.Module):
    def __init__(self, n_codes, dim, decay=0.9, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        codes = 0.1 * torch.randn(n_codes, dim)
        self.register_buffer("codebook", codes)
        self.register_buffer("cluster_size", torch.ones(n_codes))
        self.register_buffer("code_sum", codes.clone())

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.size(1))
        idx = torch.cdist(flat, self.codebook).argmin(1)
        if self.training:
            self.update_codes(flat.detach(), idx)
        q = self.codebook[idx].view(z.size(0), z.size(2), z.size(3), -1).permute(0, 3, 1, 2)
        commit = F.mse_loss(z, q.detach())
        return z + (q - z).detach(), commit, idx

    @torch.no_grad()
    def update_codes(self, flat, idx):
        one_hot = F.one_hot(idx, self.codebook.size(0)).to(flat.dtype)
        counts = one_hot.sum(0)
        sums = one_hot.t() @ flat
        dist.all_reduce(counts)
        dist.all_reduce(sums)
        self.cluster_size.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.code_sum.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        size = (self.cluster_size + self.eps) / (n + len(counts) * self.eps) * n
        self.codebook.copy_(self.code_sum / size[:, None])


class VQVAE(nn.Module):
    def __init__(self, dim=16, n_codes=48):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(1, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, 24, 4, 2, 1), nn.ReLU(), nn.Conv2d(24, dim, 1)
        )
        self.vq = EMAQuantizer(n_codes, dim)
        self.dec = nn.Sequential(
            nn.ConvTranspose2d(dim, 24, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(24, 1, 4, 2, 1)
        )

    def forward(self, x):
        q, commit, idx = self.vq(self.enc(x))
        return self.dec(q), commit, idx


def textures(n=768, size=16):
    g = torch.Generator().manual_seed(21)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    angle = torch.rand(n, 1, 1, generator=g) * torch.pi
    freq = 0.3 + torch.rand(n, 1, 1, generator=g)
    wave = torch.sin(freq * (xx * angle.cos() + yy * angle.sin()))
    return TensorDataset((wave + 0.1 * torch.randn(n, size, size, generator=g))[:, None])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    data = textures()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(VQVAE())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        used = torch.zeros(48)
        total = torch.zeros(2)
        for (x,) in loader:
            recon, commit, idx = model(x)
            loss = F.mse_loss(recon, x) + 0.25 * commit
            opt.zero_grad()
            loss.backward()
            opt.step()
            used += torch.bincount(idx, minlength=48)
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        dist.all_reduce(used)
        if rank == 0:
            p = used / used.sum()
            perplexity = torch.exp(-(p * (p + 1e-10).log()).sum())
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f} perplexity {perplexity:.1f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "vqvae.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
