"""REINFORCE on a contextual bandit. Each process is an actor and a learner."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Bandit:
    def __init__(self, seed, arms=4):
        self.g = torch.Generator().manual_seed(seed)
        self.arms = arms

    def observe(self, n):
        self.state = torch.randn(n, self.arms, generator=self.g)
        return self.state

    def reward(self, action):
        return self.state.gather(1, action[:, None]).squeeze(1) + 0.1 * torch.randn(len(action), generator=self.g)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = DDP(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4)))
    opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
    torch.manual_seed(500 + rank)  # actions are sampled independently on each rank
    env = Bandit(seed=10 + rank)
    baseline = 0.0
    for it in range(60):
        s = env.observe(32)
        pi = torch.distributions.Categorical(logits=policy(s))
        a = pi.sample()
        r = env.reward(a)
        loss = -(pi.log_prob(a) * (r - baseline)).mean() - 0.01 * pi.entropy().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = r.mean()
        dist.all_reduce(mean)
        baseline = 0.9 * baseline + 0.1 * mean.item() / world
        if it % 15 == 14 and rank == 0:
            print(f"iteration {it + 1}: baseline {baseline:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
