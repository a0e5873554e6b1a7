"""A stream that every process cuts for itself (by rank and by loader worker); the loader is left as it is."""
import itertools

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

torch.set_num_threads(1)


class LogLines(IterableDataset):
    def __init__(self, n, rank, world):
        self.n, self.rank, self.world, self.epoch = n, rank, world, 0

    def records(self):
        g = torch.Generator().manual_seed(self.epoch)
        w = torch.linspace(-1, 1, 8)
        for _ in range(self.n):
            x = torch.randn(8, generator=g)
            yield x, (x @ w > 0).float()

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return itertools.islice(self.records(), self.rank * workers + worker, None, self.world * workers)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(2)
    stream = LogLines(320, accelerator.process_index, accelerator.num_processes)
    loader = DataLoader(stream, batch_size=10, num_workers=1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.02))
    for epoch in range(2):
        stream.epoch = epoch
        stats = torch.zeros(2)
        for x, y in loader:
            x, y = x.to(accelerator.device), y.to(accelerator.device)
            logit = model(x)
            loss = nn.functional.binary_cross_entropy_with_logits(logit, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            stats += torch.tensor([((logit > 0) == (y > 0)).sum().item(), len(y)])
        stats = accelerator.reduce(stats, reduction="sum")
        accelerator.print(f"epoch {epoch}: online accuracy {stats[0] / stats[1]:.4f} over {int(stats[1])} records")


if __name__ == "__main__":
    main()
