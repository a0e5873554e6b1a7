"""Actor-critic in a grid of wind; each rank plays its own world, gradients and observation scale are shared by hand."""
import torch
import torch.distributed as dist
import torch.nn as nn

torch.set_num_threads(1)


class Wind:
    def __init__(self, seed, n=24):
        self.g, self.n = torch.Generator().manual_seed(seed), n
        self.wind = torch.randn(2, generator=self.g) * 0.3
        self.reset()

    def reset(self):
        self.pos = torch.randn(self.n, 2, generator=self.g) * 2
        return self.obs()

    def obs(self):
        return torch.cat([self.pos * 10, self.wind.expand(self.n, 2)], 1)

    def step(self, a):
        move = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])[a] * 0.4
        before = self.pos.norm(dim=1)
        self.pos = self.pos + move + self.wind * 0.3 + 0.05 * torch.randn(self.n, 2, generator=self.g)
        return self.obs(), before - self.pos.norm(dim=1)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, 4), nn.Linear(32, 1)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, o):
        h = self.body(o / self.scale)
        return self.pi(h), self.v(h).squeeze(1)


def share(t, world):
    dist.all_reduce(t)
    return t.div_(world)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = ActorCritic()
    for t in net.state_dict().values():
        dist.broadcast(t, 0)
    torch.manual_seed(1000 + rank)                # actions are sampled differently on each rank
    env = Wind(50 + rank)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for it in range(30):
        obs, logps, vals, rews, seen = env.reset(), [], [], [], []
        for _ in range(12):
            pi, v = net(obs)
            d = torch.distributions.Categorical(logits=pi)
            a = d.sample()
            seen.append(obs)
            obs, r = env.step(a)
            logps.append(d.log_prob(a)), vals.append(v), rews.append(r)
        ret = torch.stack(rews).flip(0).cumsum(0).flip(0)
        v, logp = torch.stack(vals), torch.stack(logps)
        loss = -(logp * (ret - v.detach())).mean() + 0.5 * (ret - v).square().mean()
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            share(p.grad, world)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        square = share(torch.cat(seen).square().mean(0), world)
        net.scale.mul_(0.9).add_(0.1 * square.sqrt())
        gain = share(torch.stack(rews).sum(0).mean(), world)
        if rank == 0 and it % 10 == 9:
            print(f"iteration {it + 1} mean gain {gain.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
