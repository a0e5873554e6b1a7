"""Weather stations wrote logs of very different lengths; each process owns whole stations and trains
under the join context, so that the one with less data may stop first."""
import csv
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

STATIONS = {"alpha": 400, "bravo": 90, "cedar": 330, "delta": 150, "ember": 257}


def write_log(path, name, rows):
    rng = random.Random(name)
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        for _ in range(rows):
            p, h, w = rng.gauss(0, 1), rng.random(), rng.gauss(0, 1)
            out.writerow([p, h, w, 0.7 * p - 1.2 * h + 0.5 * w * h + rng.gauss(0, 0.1)])


class StationRows(IterableDataset):
    def __init__(self, paths):
        self.paths = list(paths)
        self.epoch = 0

    def __iter__(self):
        rows = []
        for path in self.paths:
            with open(path) as f:
                rows += [[float(v) for v in r] for r in csv.reader(f)]
        random.Random(self.epoch).shuffle(rows)
        for r in rows:
            yield torch.tensor(r[:3]), torch.tensor(r[3:])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)

    mine = sorted(STATIONS)[rank::world]
    folder = Path(f"logs_{rank}")
    folder.mkdir(exist_ok=True)
    for name in mine:
        write_log(folder / f"{name}.csv", name, STATIONS[name])
    data = StationRows(folder / f"{name}.csv" for name in mine)
    loader = DataLoader(data, batch_size=16)

    model = DDP(nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for epoch in range(4):
        data.epoch = epoch
        sq, count, steps = 0.0, 0, 0
        with model.join(divide_by_initial_world_size=False):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                sq, count, steps = sq + loss.item() * len(x), count + len(x), steps + 1
        total = torch.tensor([sq, float(count)])
        dist.all_reduce(total)
        print(f"[{rank}] epoch {epoch}: {steps} steps, mse over all stations {total[0] / total[1]:.4f}",
              flush=True)

    if rank == 0:
        torch.save(model.module.state_dict(), "stations.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
