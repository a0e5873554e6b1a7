"""Zeroth-order training (MeZO style): no backward pass, the processes exchange one number per step and rebuild the update from seeds."""
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

EPS, LR = 1e-3, 0.04


def problem(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    y = (x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5, -1.0]) > 0).long()
    return TensorDataset(x, y)


def direction(seed, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def main():
    accelerator = Accelerator(cpu=True)
    set_seed(21)
    train = DataLoader(problem(2048, 1), batch_size=32, shuffle=True)
    test = DataLoader(problem(256, 2), batch_size=64)
    train, test = accelerator.prepare(train, test)
    model = nn.Linear(6, 2)
    theta = broadcast(parameters_to_vector(model.parameters()), from_process=0)
    world, rank = accelerator.num_processes, accelerator.process_index

    def loss_at(vector, x, y):
        vector_to_parameters(vector, model.parameters())
        return nn.functional.cross_entropy(model(x), y)

    step = 0
    for epoch in range(3):
        for x, y in train:
            z = direction(step * world + rank, theta.numel())
            slope = (loss_at(theta + EPS * z, x, y) - loss_at(theta - EPS * z, x, y)) / (2 * EPS)
            slopes = accelerator.gather(slope.reshape(1))
            for other, g in enumerate(slopes.tolist()):
                theta = theta - LR * g / world * direction(step * world + other, theta.numel())
            step += 1

        vector_to_parameters(theta, model.parameters())
        right = []
        for x, y in test:
            right.append(accelerator.gather_for_metrics((model(x).argmax(1) == y).float()))
        accelerator.print(f"epoch {epoch}: acc {torch.cat(right).mean():.3f}")

    accelerator.wait_for_everyone()
    accelerator.save({"theta": theta}, "theta.pt")


if __name__ == "__main__":
    main()
