import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class VAE(nn.Module):
    def __init__(self, x_dim=32, h_dim=48, z_dim=4):
        super().__init__()
        self.enc = nn.Linear(x_dim, h_dim)
        self.mu = nn.Linear(h_dim, z_dim)
        self.logvar = nn.Linear(h_dim, z_dim)
        self.dec = nn.Sequential(nn.Linear(z_dim, h_dim), nn.ReLU(), nn.Linear(h_dim, x_dim))

    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        return self.dec(z), mu, logvar

    def elbo(self, x):
        recon, mu, logvar = self(x)
        rec = F.mse_loss(recon, x, reduction="none").sum(1)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
        return rec.mean() + 0.1 * kl.mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)
    basis = torch.randn(4, 32)
    data = TensorDataset(torch.randn(512, 4) @ basis + 0.1 * torch.randn(512, 32))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    model = DDP(VAE())
    torch.manual_seed(100 + rank)
    optim = torch.optim.Adam(model.parameters(), 2e-3)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        mean = 0.0
        for (x,) in loader:
            optim.zero_grad()
            loss = model.module.elbo(x)
            loss.backward()
            optim.step()
            mean += loss.item() / len(loader)
        mean = torch.tensor(mean)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}  -elbo {mean.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


main()
