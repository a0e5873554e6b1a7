"""GAN for points on a spiral, one optimizer per network."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
LATENT = 4


def mlp(i, o, w=32):
    return nn.Sequential(nn.Linear(i, w), nn.LeakyReLU(0.2), nn.Linear(w, w), nn.LeakyReLU(0.2), nn.Linear(w, o))


def spiral(n, gen):
    t = torch.rand(n, generator=gen) * 9 + 1
    p = torch.stack([t.cos(), t.sin()], 1) * t[:, None] / 10
    return p + 0.02 * torch.randn(n, 2, generator=gen)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10 + rank)                 # latents differ per rank
    gen = torch.Generator().manual_seed(500 + rank)
    G, D = DDP(mlp(LATENT, 2)), DDP(mlp(2, 1))
    g_opt = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.9))
    d_opt = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.9))
    for it in range(60):
        real = spiral(64, gen)
        # critic: two updates per generator update
        for _ in range(2):
            with torch.no_grad():
                fake = G.module(torch.randn(64, LATENT))
            score = D(torch.cat([real, fake]))
            target = torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])
            d_loss = F.binary_cross_entropy_with_logits(score, target)
            d_opt.zero_grad()
            d_loss.backward()
            d_opt.step()
        # generator: the critic is used without its wrapper, its own gradients are thrown away
        D.module.requires_grad_(False)
        g_loss = F.softplus(-D.module(G(torch.randn(64, LATENT)))).mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        D.module.requires_grad_(True)
        if it % 20 == 19:
            s = torch.stack([d_loss.detach(), g_loss.detach()])
            dist.all_reduce(s)
            if rank == 0:
                print(f"it {it + 1} D {s[0] / world:.4f} G {s[1] / world:.4f}", flush=True)
    if rank == 0:
        torch.save({"G": G.module.state_dict(), "D": D.module.state_dict()}, "gan.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
