"""Waveform GAN: two DDP models, alternating optimizers, the critic is stepped twice as often."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LENGTH, LATENT = 32, 8
EPOCHS = 6


def waveforms(n=1024):
    g = torch.Generator().manual_seed(14)
    t = torch.linspace(0, 1, LENGTH)
    freq = 1 + 3 * torch.rand(n, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    amp = 0.5 + 0.5 * torch.rand(n, 1, generator=g)
    return TensorDataset(amp * torch.sin(6.28 * freq * t + phase))


def generator():
    return nn.Sequential(
        nn.Linear(LATENT, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, LENGTH), nn.Tanh()
    )


def critic():
    return nn.Sequential(
        nn.Linear(LENGTH, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )


def set_grad(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(77)
    data = waveforms()
    sampler = DistributedSampler(data, shuffle=True, seed=2)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    G, D = DDP(generator()), DDP(critic())
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.9))
    noise = torch.Generator().manual_seed(1000 + rank)  # other latents on each rank

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        stats = torch.zeros(4)
        for i, (real,) in enumerate(loader):
            n = len(real)
            # critic: the generator only makes data here, so it is used without its wrapper
            with torch.no_grad():
                fake = G.module(torch.randn(n, LATENT, generator=noise))
            score_real, score_fake = D(torch.cat([real, fake])).split(n)
            loss_d = F.softplus(-score_real).mean() + F.softplus(score_fake).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            stats[:2] += torch.tensor([loss_d.item(), 1.0])

            if i % 2 == 1:
                # generator: the critic is held fixed, its gradients are not wanted and not reduced
                set_grad(D.module, False)
                out = D.module(G(torch.randn(n, LATENT, generator=noise)))
                loss_g = F.softplus(-out).mean()
                opt_g.zero_grad()
                loss_g.backward()
                opt_g.step()
                set_grad(D.module, True)
                stats[2:] += torch.tensor([loss_g.item(), 1.0])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} critic {stats[0] / stats[1]:.4f} generator {stats[2] / stats[3]:.4f}")

    if rank == 0:
        torch.save({"generator": G.module.state_dict(), "critic": D.module.state_dict()}, "wavegan.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
