"""REINFORCE with a value baseline on a point-mass task; every process collects its own episodes
and the gradients are averaged."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Normal


class PointMass:
    """n parallel particles on a plane; reward is minus the distance to the origin."""

    def __init__(self, n, horizon=20):
        self.n, self.horizon = n, horizon

    def reset(self):
        self.pos = 2 * torch.rand(self.n, 2) - 1
        self.vel = torch.zeros(self.n, 2)
        return torch.cat([self.pos, self.vel], 1)

    def step(self, action):
        self.vel = 0.8 * self.vel + 0.2 * action.clamp(-1, 1)
        self.pos = self.pos + self.vel
        return torch.cat([self.pos, self.vel], 1), -self.pos.norm(dim=1)


class Agent(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.mean, self.value = nn.Linear(hidden, 2), nn.Linear(hidden, 1)
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def forward(self, obs):
        h = self.body(obs)
        return Normal(self.mean(h), self.log_std.exp()), self.value(h).squeeze(-1)


def collect(env, agent, gamma):
    obs = env.reset()
    logps, values, rewards = [], [], []
    for _ in range(env.horizon):
        policy, value = agent(obs)
        action = policy.sample()
        obs, reward = env.step(action)
        logps.append(policy.log_prob(action).sum(-1))
        values.append(value)
        rewards.append(reward)
    returns, running = [], torch.zeros(env.n)
    for r in reversed(rewards):
        running = r + gamma * running
        returns.insert(0, running)
    return torch.stack(logps), torch.stack(values), torch.stack(returns), torch.stack(rewards).sum(0)


def average_gradients(agent, world):
    flat = torch.cat([p.grad.view(-1) for p in agent.parameters()])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= world
    offset = 0
    for p in agent.parameters():
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=40)
    ap.add_argument("--envs", type=int, default=64)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + 1000 * rank)

    env = PointMass(args.envs)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3)

    for it in range(args.iterations):
        logp, value, ret, episode = collect(env, agent, gamma=0.95)
        adv = ret - value.detach()
        loss = -(logp * adv).mean() + 0.5 * (ret - value).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(agent, world)
        nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
        optimizer.step()
        if it % 10 == 9:
            score = episode.mean()
            dist.all_reduce(score)
            if rank == 0:
                print(f"iteration {it + 1}: mean return {score.item() / world:.2f}")
    if rank == 0:
        torch.save(agent.state_dict(), "agent.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
