"""Steering a boat against the current, REINFORCE with normalised observations, one fleet of boats per rank."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class Boats:
    """Position, speed, current; the action pushes left or right."""

    def __init__(self, n, seed, current):
        self.n, self.gen, self.current = n, torch.Generator().manual_seed(seed), current

    def reset(self):
        self.s = torch.stack([torch.randn(self.n, generator=self.gen) * 3,
                              torch.zeros(self.n), torch.full((self.n,), self.current)], 1)
        return self.s.clone()

    def step(self, a):
        push = a.float() * 2 - 1
        drift = self.current * 0.2 + 0.1 * torch.randn(self.n, generator=self.gen)
        self.s[:, 1] = 0.9 * self.s[:, 1] + 0.5 * push + drift
        self.s[:, 0] = self.s[:, 0] + 0.3 * self.s[:, 1]
        return self.s.clone(), -self.s[:, 0].abs() * 0.1


class ObsNorm:
    def __init__(self, dim):
        self.n, self.s1, self.s2 = 1e-4, torch.zeros(dim), torch.ones(dim) * 1e-4

    def update(self, obs):
        m = torch.cat([obs.sum(0), obs.square().sum(0), torch.tensor([float(len(obs))])])
        dist.all_reduce(m)
        d = obs.shape[1]
        self.s1 += m[:d]
        self.s2 += m[d:2 * d]
        self.n += m[-1].item()

    def __call__(self, obs):
        mean = self.s1 / self.n
        std = (self.s2 / self.n - mean ** 2).clamp(min=1e-4).sqrt()
        return ((obs - mean) / std).clamp(-5, 5)


def rollout(policy, norm, env, horizon=25):
    obs, xs, acts, rews = env.reset(), [], [], []
    for _ in range(horizon):
        x = norm(obs)
        with torch.no_grad():
            a = torch.multinomial(policy(x).softmax(1), 1).squeeze(1)
        xs.append(x), acts.append(a)
        norm.update(obs)
        obs, r = env.step(a)
        rews.append(r)
    ret = torch.stack(rews).flip(0).cumsum(0).flip(0)
    return torch.cat(xs), torch.cat(acts), (ret - ret.mean(1, keepdim=True)).flatten(), torch.stack(rews).sum(0).mean()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(40 + rank)
    policy = DDP(nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2)))
    opt = torch.optim.Adam(policy.parameters(), lr=1e-2)
    env, norm = Boats(32, 900 + rank, current=0.5 - 1.0 * rank), ObsNorm(3)
    for it in range(40):
        x, a, adv, score = rollout(policy.module, norm, env)
        logp = policy(x).log_softmax(1).gather(1, a[:, None]).squeeze(1)
        opt.zero_grad()
        (-(logp * adv).mean()).backward()
        opt.step()
        dist.all_reduce(score)
        if rank == 0 and it % 10 == 9:
            print(f"iteration {it} mean return {score.item() / world:.3f}", flush=True)
    print(f"[{rank}] observation means {(norm.s1 / norm.n).tolist()}", flush=True)
    if rank == 0:
        torch.save({"policy": policy.module.state_dict(), "s1": norm.s1, "s2": norm.s2, "n": norm.n}, "boat.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
