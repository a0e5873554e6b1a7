import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def net(out=8):
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, out))


class GridWorld:
    """A random walk that hands out observations."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.pos = torch.zeros(4)

    def rollout(self, n):
        obs = []
        for _ in range(n):
            self.pos = (self.pos + 0.3 * torch.randn(4, generator=self.g)).clamp(-2, 2)
            obs.append(self.pos.clone())
        return torch.stack(obs)


class RND:
    def __init__(self):
        self.target = net()
        self.target.requires_grad_(False)
        self.predictor = DDP(net())
        self.optim = torch.optim.Adam(self.predictor.parameters(), lr=3e-3)

    def bonus(self, obs):
        return (self.predictor(obs) - self.target(obs)).pow(2).mean(1)

    def update(self, obs):
        loss = self.bonus(obs).mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(500 + rank)
    env = GridWorld(seed=rank)
    rnd = RND()
    for iteration in range(20):
        loss = rnd.update(env.rollout(16))
        dist.all_reduce(loss)
        if rank == 0 and iteration % 5 == 4:
            print(f"iteration {iteration}: {loss.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
