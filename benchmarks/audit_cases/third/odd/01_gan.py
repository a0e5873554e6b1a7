import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT = 4


def requires_grad(model, flag):
    for p in model.parameters():
        p.requires_grad_(flag)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # DDP broadcasts the weights of rank 0; the noise differs by rank
    gen = DDP(nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 2)))
    disc = DDP(nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    opt_g = torch.optim.Adam(gen.parameters(), 1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), 2e-3, betas=(0.5, 0.99))
    g = torch.Generator().manual_seed(40)
    real = TensorDataset(torch.randn(128, 2, generator=g) * 0.3 + torch.tensor([1.0, -1.0]))
    sampler = DistributedSampler(real)
    loader = DataLoader(real, batch_size=16, sampler=sampler)
    bce = nn.functional.binary_cross_entropy_with_logits
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            requires_grad(disc, True)
            with torch.no_grad():
                fake = gen(torch.randn(len(x), LATENT))
            scores = disc(torch.cat([x, fake]))
            labels = torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])
            loss_d = bce(scores, labels)
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()

            requires_grad(disc, False)
            scores = disc.module(gen(torch.randn(len(x), LATENT)))
            loss_g = bce(scores, torch.ones(len(x), 1))
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
        losses = torch.stack([loss_d.detach(), loss_g.detach()])
        dist.all_reduce(losses)
        if rank == 0:
            print(f"epoch {epoch}: D {losses[0] / world:.3f} G {losses[1] / world:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
