"""DCGAN-style toy: both networks in DDP, alternating steps."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(i, o, last=None):
    layers = [nn.Linear(i, 48), nn.LeakyReLU(0.2), nn.Linear(48, o)]
    return nn.Sequential(*layers, *([last] if last else []))


def requires_grad(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    G, D = DDP(mlp(6, 3, nn.Tanh())), DDP(mlp(3, 1))
    g = torch.Generator().manual_seed(1)
    real_data = TensorDataset(torch.tanh(torch.randn(512, 3, generator=g) @ torch.randn(3, 3, generator=g)))
    sampler = DistributedSampler(real_data)
    loader = DataLoader(real_data, batch_size=32, sampler=sampler)
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.9))
    noise = torch.Generator().manual_seed(1000 + rank)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            # D step
            requires_grad(D, True)
            opt_d.zero_grad()
            with torch.no_grad():
                fake = G(torch.randn(len(real), 6, generator=noise))
            out = D(torch.cat([real, fake])).squeeze(1)
            n = len(real)
            d_loss = nn.functional.softplus(-out[:n]).mean() + nn.functional.softplus(out[n:]).mean()
            d_loss.backward()
            opt_d.step()

            # G step: gradients flow through D, but D itself is not trained
            requires_grad(D, False)
            opt_g.zero_grad()
            fake = G(torch.randn(n, 6, generator=noise))
            g_loss = nn.functional.softplus(-D.module(fake)).mean()
            g_loss.backward()
            opt_g.step()
        if rank == 0:
            print(f"epoch {epoch} d {d_loss.item():.3f} g {g_loss.item():.3f} (rank 0)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
