import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    """Eight files; a reader (rank, worker) takes its own files and mixes them in a small buffer."""

    def __init__(self, files=8, rows=40, buffer=32):
        self.files, self.rows, self.buffer = files, rows, buffer
        self.epoch = 0

    def read(self, number):
        g = torch.Generator().manual_seed(number)
        for _ in range(self.rows):
            x = torch.randn(6, generator=g)
            yield x, (x.sum() > 0).float()

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        reader = dist.get_rank() * workers + worker
        readers = dist.get_world_size() * workers
        order = list(range(self.files))
        random.Random(self.epoch).shuffle(order)
        rng = random.Random(f"{self.epoch}-{reader}")
        pool = []
        for number in order[reader::readers]:
            for row in self.read(number):
                pool.append(row)
                if len(pool) > self.buffer:
                    yield pool.pop(rng.randrange(len(pool)))
        rng.shuffle(pool)
        yield from pool


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stream = Shards()
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        stream.epoch = epoch
        loader = DataLoader(stream, batch_size=10, num_workers=2)
        total, n = torch.zeros(1), 0
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
            n += 1
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {n} batches, loss {total.item() / n / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
