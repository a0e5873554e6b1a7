"""Click-through model that streams its training data from JSON-lines shards."""
import json
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

DATA = Path("clicks")
N_SHARDS, PER_SHARD = 8, 128
EPOCHS, BATCH, WORKERS = 3, 32, 2


def write_shards():
    rng = random.Random(42)
    weight = [rng.gauss(0, 0.6) for _ in range(50)]
    DATA.mkdir(exist_ok=True)
    for s in range(N_SHARDS):
        with open(DATA / f"part-{s:03d}.jsonl", "w") as f:
            for _ in range(PER_SHARD):
                user, item = rng.randrange(30), rng.randrange(20)
                dense = [rng.gauss(0, 1) for _ in range(4)]
                score = weight[user] + weight[30 + item] + 0.7 * dense[0] - 0.5 * dense[1]
                f.write(json.dumps({"user": user, "item": item, "dense": dense, "click": int(score + rng.gauss(0, 0.5) > 0)}) + "\n")


class ClickStream(IterableDataset):
    def __init__(self, folder, rank, world, seed=0):
        self.files = sorted(str(p) for p in Path(folder).glob("part-*.jsonl"))
        self.rank, self.world = rank, world
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        files = list(self.files)
        random.Random(self.seed + self.epoch).shuffle(files)
        info = get_worker_info()
        index, total = (info.id, info.num_workers) if info is not None else (0, 1)
        index, total = self.rank * total + index, self.world * total
        for path in files[index::total]:
            with open(path) as f:
                for line in f:
                    r = json.loads(line)
                    yield r["user"], r["item"], torch.tensor(r["dense"]), float(r["click"])


class ClickModel(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.user, self.item = nn.Embedding(30, dim), nn.Embedding(20, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim + 4, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item, dense):
        return self.mlp(torch.cat([self.user(user), self.item(item), dense], dim=1)).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        write_shards()
    dist.barrier()

    torch.manual_seed(0)
    stream = ClickStream(DATA, rank, dist.get_world_size())
    loader = DataLoader(stream, batch_size=BATCH, num_workers=WORKERS)
    model = DDP(ClickModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)
        total = torch.zeros(2)
        for user, item, dense, click in loader:
            loss = F.binary_cross_entropy_with_logits(model(user, item, dense), click.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: log loss {total[0] / total[1]:.4f}")

    if rank == 0:
        torch.save(model.module.state_dict(), "clicks.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
