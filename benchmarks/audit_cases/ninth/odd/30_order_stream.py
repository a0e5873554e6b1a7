"""Order volume model on an endless stream: each rank reads its own part of it, and tests its own part of the test set."""
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

FIELDS = 10
WEIGHT = torch.randn(FIELDS, 4, generator=torch.Generator().manual_seed(0)) * 0.6


def orders(n, gen):
    x = torch.randn(n, FIELDS, generator=gen)
    y = torch.sin(x @ WEIGHT).sum(dim=1, keepdim=True) + 0.2 * torch.randn(n, 1, generator=gen)
    return x, y


class OrderStream(IterableDataset):
    """Blocks of the common stream are numbered; rank r takes blocks r, r + world, r + 2 * world, ..."""

    def __init__(self, rank, world, block=8):
        self.rank, self.world, self.block = rank, world, block

    def __iter__(self):
        for number in itertools.count(self.rank, self.world):
            x, y = orders(self.block, torch.Generator().manual_seed(10_000 + number))
            yield from zip(x, y)


@torch.no_grad()
def test_error(accelerator, net, x, y):
    """Every sample is tested once; the parts may differ in size, since only sums are reduced."""
    net.eval()
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    squared = torch.zeros(2, dtype=torch.float64)
    for bx, by in DataLoader(TensorDataset(x[mine], y[mine]), batch_size=32):
        squared += torch.tensor([(net(bx) - by).pow(2).sum().item(), float(len(by))], dtype=torch.float64)
    squared = accelerator.reduce(squared, reduction="sum")
    net.train()
    return (squared[0] / squared[1]).item()


def main(rounds=4, steps_per_round=40, batch_size=16):
    set_seed(3)
    accelerator = Accelerator(cpu=True)
    test_x, test_y = orders(301, torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(FIELDS, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    # not prepared: the stream is already divided, and has neither length nor end
    stream = DataLoader(OrderStream(accelerator.process_index, accelerator.num_processes), batch_size=batch_size)
    batches = iter(stream)

    for number in range(rounds):
        model.train()
        total = torch.zeros(())
        # a fixed number of steps, equal on both ranks; the iterator goes on where it stood
        for x, y in itertools.islice(batches, steps_per_round):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        train_loss = accelerator.reduce(total / steps_per_round, reduction="mean").item()
        error = test_error(accelerator, accelerator.unwrap_model(model), test_x, test_y)
        accelerator.print(f"round {number}: train mse {train_loss:.4f} test mse {error:.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "orders.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
