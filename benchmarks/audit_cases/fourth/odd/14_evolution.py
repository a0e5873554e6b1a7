"""Evolution strategy for a swing controller. No autograd: ranks exchange seeds and rewards only."""
import torch
import torch.distributed as dist

torch.set_num_threads(1)
PAIRS_PER_RANK, SIGMA, LR, GENERATIONS = 8, 0.1, 0.15, 20
SHAPES = [(8, 3), (8,), (1, 8), (1,)]
SIZE = sum(torch.Size(s).numel() for s in SHAPES)


def act(theta, obs):
    w1, b1, w2, b2 = [p.view(s) for p, s in zip(theta.split([torch.Size(s).numel() for s in SHAPES]), SHAPES)]
    return torch.tanh(torch.tanh(obs @ w1.T + b1) @ w2.T + b2)


def episode(theta, seed, boats=16, horizon=40):
    g = torch.Generator().manual_seed(seed)
    ang, vel = torch.randn(boats, generator=g) * 0.5, torch.zeros(boats)
    total = 0.0
    for _ in range(horizon):
        u = act(theta, torch.stack([ang.sin(), ang.cos(), vel], 1)).squeeze(1)
        vel = 0.98 * vel + 0.1 * (ang.sin() + 2 * u)
        ang = ang + 0.1 * vel
        total -= (ang.square() + 0.1 * vel.square() + 0.01 * u.square()).mean().item()
    return total


def noise(seed):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    theta = 0.1 * noise(12345)
    for gen in range(GENERATIONS):
        seeds = [(gen * world + rank) * PAIRS_PER_RANK + i for i in range(PAIRS_PER_RANK)]
        mine = []
        for s in seeds:
            eps = SIGMA * noise(s)
            mine.append([float(s), episode(theta + eps, s), episode(theta - eps, s)])
        mine = torch.tensor(mine, dtype=torch.double)
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        table = torch.cat(everyone)
        diff = table[:, 1] - table[:, 2]
        diff = diff / diff.std().clamp(min=1e-8)
        step = sum(d.float() * noise(int(s)) for s, d in zip(table[:, 0].tolist(), diff))
        theta += LR * step / len(table)
        if rank == 0 and gen % 5 == 4:
            print(f"generation {gen + 1} reward {episode(theta, 10**6):.3f}", flush=True)
    print(f"[{rank}] |theta| {theta.norm().item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
