"""Wasserstein GAN on a ring of Gaussians: several critic steps per generator step, clipped critic."""
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT, N_CRITIC, CLIP = 4, 3, 0.1


def ring(n):
    g = torch.Generator().manual_seed(6)
    k = torch.randint(0, 8, (n,), generator=g).float() * math.pi / 4
    return torch.stack([k.cos(), k.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)


def mlp(d_in, d_out):
    return nn.Sequential(nn.Linear(d_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64),
                         nn.LeakyReLU(0.2), nn.Linear(64, d_out))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    generator, critic = DDP(mlp(LATENT, 2)), DDP(mlp(2, 1))
    opt_g = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=1e-3)

    data = TensorDataset(ring(2400))
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=40, sampler=sampler, drop_last=True)
    noise = torch.Generator().manual_seed(500 + rank)

    step = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            with torch.no_grad():
                fake = generator.module(torch.randn(len(real), LATENT, generator=noise))
            scores = critic(torch.cat([real, fake]))
            loss_c = scores[len(real):].mean() - scores[:len(real)].mean()
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()
            with torch.no_grad():
                for w in critic.parameters():
                    w.clamp_(-CLIP, CLIP)

            step += 1
            if step % N_CRITIC == 0:
                critic.requires_grad_(False)
                sample = generator(torch.randn(len(real), LATENT, generator=noise))
                loss_g = -critic.module(sample).mean()
                opt_g.zero_grad()
                loss_g.backward()
                opt_g.step()
                critic.requires_grad_(True)

        stat = loss_c.detach().clone()
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch}: critic loss of the last batch {stat.item() / dist.get_world_size():.4f}")

    if rank == 0:
        torch.save({"g": generator.module.state_dict(), "c": critic.module.state_dict()}, "wgan.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
