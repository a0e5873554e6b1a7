"""Anomaly scores for server logs that are read as a stream of records (no index, two reader processes)."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

torch.set_num_threads(1)
N_RECORDS, FEATS = 1600, 16


class LogStream(IterableDataset):
    def __init__(self, n, seed, rank=0, world=1):
        self.n, self.seed, self.rank, self.world = n, seed, rank, world

    def record(self, i):
        r = random.Random(self.seed * 1_000_003 + i)
        odd = r.random() < 0.4
        x = torch.tensor([r.gauss(0.7 if odd and k % 3 == 0 else 0.0, 1.0) for k in range(FEATS)])
        return i, x, torch.tensor(float(odd))

    def __iter__(self):
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info else (0, 1)
        part, parts = part + self.rank * parts, parts * self.world
        for i in range(part, self.n, parts):
            yield self.record(i)


def evaluate(model, rank, world):
    src = LogStream(400, 8)
    rows = [src.record(i) for i in range(rank, 400, world)]
    x, y = torch.stack([r[1] for r in rows]), torch.stack([r[2] for r in rows])
    with torch.no_grad():
        hits = ((model(x).squeeze(1) > 0).float() == y).sum()
    dist.all_reduce(hits)
    return hits.item() / 400


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(FEATS, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        stream = LogStream(N_RECORDS, seed=1, rank=rank, world=world)
        loader = DataLoader(stream, batch_size=40, num_workers=2)
        seen = set()
        for ids, x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen.update(ids.tolist())
        acc = evaluate(model.module, rank, world)
        print(f"[{rank}] epoch {epoch} records {len(seen)} accuracy {acc:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
