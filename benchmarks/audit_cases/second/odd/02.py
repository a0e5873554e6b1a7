import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP


class Corridor:
    """The agent starts in the middle and must reach the right end; every rank plays its own games."""

    def __init__(self, length, seed):
        self.length = length
        self.rng = torch.Generator().manual_seed(seed)

    def reset(self):
        self.pos, self.t = self.length // 2, 0
        return self.obs()

    def obs(self):
        o = torch.zeros(self.length)
        o[self.pos] = 1
        return o

    def step(self, action):
        slip = torch.rand(1, generator=self.rng).item() < 0.1
        move = 1 if (action == 1) != slip else -1
        self.pos = min(max(self.pos + move, 0), self.length - 1)
        self.t += 1
        done = self.pos == self.length - 1 or self.t >= 30
        return self.obs(), (1.0 if self.pos == self.length - 1 else -0.02), done


@torch.no_grad()
def play(policy, env, gamma=0.97):
    obs, actions, rewards = [], [], []
    o, done = env.reset(), False
    while not done:
        a = Categorical(logits=policy(o)).sample()
        obs.append(o)
        actions.append(a)
        o, r, done = env.step(a.item())
        rewards.append(r)
    returns, acc = [], 0.0
    for r in reversed(rewards):
        acc = r + gamma * acc
        returns.append(acc)
    return torch.stack(obs), torch.stack(actions), torch.tensor(returns[::-1]), sum(rewards)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=25)
    ap.add_argument("--games", type=int, default=4)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    env = Corridor(9, seed=1000 + rank)
    policy = DDP(nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 2)))
    opt = torch.optim.Adam(policy.parameters(), lr=1e-2)

    for it in range(args.iterations):
        # acting needs no gradients, so the bare module is used
        games = [play(policy.module, env) for _ in range(args.games)]
        obs, act, ret = (torch.cat([g[i] for g in games]) for i in range(3))
        stats = torch.tensor([len(ret), ret.sum(), (ret**2).sum(), sum(g[3] for g in games)])
        dist.all_reduce(stats)
        mean = stats[1] / stats[0]
        std = (stats[2] / stats[0] - mean**2).clamp_min(1e-8).sqrt()
        adv = (ret - mean) / (std + 1e-6)
        logp = Categorical(logits=policy(obs)).log_prob(act)
        # games have different lengths: sum here, divide by the number of moves on all ranks
        loss = -(logp * adv).sum() * world / stats[0]
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and it % 8 == 7:
            print(f"iteration {it + 1} mean score {stats[3].item() / (args.games * world):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
