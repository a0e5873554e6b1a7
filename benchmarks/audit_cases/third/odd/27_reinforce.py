import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Corridor:
    """Reach +3 or fall off at -3 within 12 steps."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def reset(self):
        self.pos, self.t = torch.randint(-1, 2, (), generator=self.g).item(), 0
        return self.observe()

    def observe(self):
        return torch.tensor([self.pos / 3, self.t / 12])

    def step(self, action):
        slip = torch.rand((), generator=self.g).item() < 0.1
        self.pos += (1 if action else -1) * (-1 if slip else 1)
        self.t += 1
        done = abs(self.pos) >= 3 or self.t >= 12
        return self.observe(), (1.0 if self.pos >= 3 else -0.05), done


def episode(env, net):
    obs, observations, actions, rewards = env.reset(), [], [], []
    done = False
    while not done:
        with torch.no_grad():
            a = torch.distributions.Categorical(logits=net(obs)).sample()
        observations.append(obs)
        actions.append(a)
        obs, r, done = env.step(a.item())
        rewards.append(r)
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    return torch.stack(observations), torch.stack(actions), returns


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    policy = DDP(net)
    opt = torch.optim.Adam(policy.parameters(), 0.02)
    env = Corridor(seed=1000 + rank)
    for iteration in range(12):
        obs, act, ret = (torch.cat(t) for t in zip(*[episode(env, net) for _ in range(4)]))
        stats = torch.stack([ret.sum(), ret.square().sum(), torch.tensor(float(len(ret)))])
        dist.all_reduce(stats)
        mean = stats[0] / stats[2]
        std = (stats[1] / stats[2] - mean**2).clamp(min=1e-8).sqrt()
        logp = torch.distributions.Categorical(logits=policy(obs)).log_prob(act)
        loss = -(logp * (ret - mean) / std).sum() * world / stats[2]
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and iteration % 4 == 3:
            print(f"iteration {iteration}: mean return {mean.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
