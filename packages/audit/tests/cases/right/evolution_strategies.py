import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def perturbation(seed, n):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def fitness(model, theta, x, y):
    vector_to_parameters(theta, model.parameters())
    return -nn.functional.mse_loss(model(x), y).item()


@torch.no_grad()
def main(generations=10, pairs=8, sigma=0.1, lr=0.2):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    theta = parameters_to_vector(model.parameters()).clone()
    g = torch.Generator().manual_seed(1)
    x = torch.randn(64, 3, generator=g)
    y = x.sum(1, keepdim=True)
    for generation in range(generations):
        mine = []
        for k in range(pairs):
            seed = (generation * world + rank) * pairs + k
            eps = sigma * perturbation(seed, len(theta))
            mine.append((seed, fitness(model, theta + eps, x, y), fitness(model, theta - eps, x, y)))
        everybody = [None] * world
        dist.all_gather_object(everybody, mine)
        results = [r for part in everybody for r in part]
        scores = torch.tensor([plus - minus for _, plus, minus in results])
        scores = scores / scores.std().clamp(min=1e-6)
        step = sum(s * perturbation(seed, len(theta)) for s, (seed, _, _) in zip(scores, results))
        theta = theta + lr * step / len(results)
        if rank == 0 and generation % 3 == 0:
            print(f"generation {generation}: {-fitness(model, theta, x, y):.4f}")
    vector_to_parameters(theta, model.parameters())
    if rank == 0:
        torch.save(model.state_dict(), "es.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
