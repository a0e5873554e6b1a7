"""A GAN on eight Gaussians on a circle."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SIZE, BATCH, STEPS = 8, 32, 10


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


class Trainer:
    def __init__(self):
        self.rank = dist.get_rank()
        torch.manual_seed(42)
        self.generator, self.critic = DDP(network(SIZE, 2)), DDP(network(2, 1))
        self.generator_step = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
        self.critic_step = torch.optim.Adam(self.critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
        self.random = torch.Generator().manual_seed(1234 + self.rank)

    def noise(self):
        return torch.randn(BATCH, SIZE, generator=self.random)

    def real(self):
        angle = torch.randint(0, 8, (BATCH,), generator=self.random) * (torch.pi / 4)
        points = torch.stack([angle.cos(), angle.sin()], 1)
        return points + 0.05 * torch.randn(BATCH, 2, generator=self.random)

    def train(self):
        with torch.no_grad():
            fake = self.generator.module(self.noise())
        scores = self.critic(torch.cat([self.real(), fake]))
        wanted = torch.cat([torch.ones(BATCH, 1), torch.zeros(BATCH, 1)])
        critic_loss = F.binary_cross_entropy_with_logits(scores, wanted)
        critic_loss.backward()
        self.critic_step.step()
        self.critic_step.zero_grad()

        scores = self.critic(self.generator(self.noise()))
        loss = F.binary_cross_entropy_with_logits(scores, torch.ones(BATCH, 1))
        loss.backward()
        self.generator_step.step()
        self.generator_step.zero_grad()
        return critic_loss.detach(), loss.detach()


def main():
    dist.init_process_group("gloo")
    trainer = Trainer()
    for epoch in range(2):
        sums = torch.zeros(2)
        for _ in range(STEPS):
            sums += torch.stack(trainer.train())
        dist.all_reduce(sums)
        sums /= STEPS * dist.get_world_size()
        if trainer.rank == 0:
            print(f"epoch {epoch} critic {sums[0]:.4f} generator {sums[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
