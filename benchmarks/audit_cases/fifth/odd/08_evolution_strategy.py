"""Evolution strategy for a small controller. Processes evaluate different perturbations and exchange only the
fitness values; each one rebuilds all the noise from the seeds and makes the same update."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def episode(policy, start):
    """Swing a damped pendulum upright from many start angles at once; returns the mean reward."""
    angle, speed = start[:, 0], start[:, 1]
    total = torch.zeros(len(start))
    for _ in range(40):
        obs = torch.stack([angle.cos(), angle.sin(), speed], 1)
        torque = 2 * torch.tanh(policy(obs)).squeeze(-1)
        speed = (speed + 0.05 * (9.8 * angle.sin() + 3 * torque)).clamp(-8, 8)
        angle = angle + 0.05 * speed
        wrapped = torch.remainder(angle + torch.pi, 2 * torch.pi) - torch.pi
        total -= wrapped ** 2 + 0.1 * speed ** 2
    return total.mean()


def perturbation(generation, index, size):
    g = torch.Generator().manual_seed(generation * 100003 + index)
    return torch.randn(size, generator=g)


@torch.no_grad()
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--generations", type=int, default=25)
    ap.add_argument("--pairs", type=int, default=16)
    ap.add_argument("--sigma", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(4)
    policy = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    theta = parameters_to_vector(policy.parameters())
    momentum = torch.zeros_like(theta)

    mine = range(rank, args.pairs, world)
    for gen in range(args.generations):
        g = torch.Generator().manual_seed(gen)
        start = torch.stack([0.6 * torch.randn(64, generator=g), 0.3 * torch.randn(64, generator=g)], 1)

        fitness = torch.zeros(args.pairs, 2)
        for i in mine:
            eps = perturbation(gen, i, theta.numel())
            for side, sign in enumerate((1, -1)):
                vector_to_parameters(theta + sign * args.sigma * eps, policy.parameters())
                fitness[i, side] = episode(policy, start)
        dist.all_reduce(fitness)

        ranks = fitness.flatten().argsort().argsort().float().view_as(fitness)
        utility = ranks / (fitness.numel() - 1) - 0.5
        step = torch.zeros_like(theta)
        for i in range(args.pairs):
            step += (utility[i, 0] - utility[i, 1]) * perturbation(gen, i, theta.numel())
        momentum = 0.9 * momentum + step / (args.pairs * args.sigma)
        theta = theta + args.lr * momentum
        if rank == 0 and gen % 5 == 4:
            print(f"generation {gen + 1}: mean fitness {fitness.mean():.2f}, best {fitness.max():.2f}")

    vector_to_parameters(theta, policy.parameters())
    if rank == 0:
        torch.save(policy.state_dict(), "controller.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
