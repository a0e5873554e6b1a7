# Click prediction with the hashing trick: every "field=value" string goes to one of BUCKETS rows.
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
BUCKETS = 1 << 14
BATCH = 64


def synth_log(n, seed):
    rnd = random.Random(seed)
    taste = {}
    rows = []
    for _ in range(n):
        toks = [f"site={rnd.randrange(60)}", f"ad={rnd.randrange(80)}", f"hour={rnd.randrange(24)}"]
        score = 0.0
        for t in toks:
            if t not in taste:
                taste[t] = random.Random(t).gauss(0, 1.5)
            score += taste[t]
        rows.append((toks, float(score + rnd.gauss(0, 0.5) > 0)))
    return rows


def encode(rows):
    ids = [[hash(t) % BUCKETS for t in toks] for toks, _ in rows]
    return torch.tensor(ids), torch.tensor([y for _, y in rows])


class ClickModel(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.wide = nn.EmbeddingBag(BUCKETS, 1, mode="sum")
        self.deep = nn.EmbeddingBag(BUCKETS, dim, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(dim, 16), nn.ReLU(), nn.Linear(16, 1))
        nn.init.zeros_(self.wide.weight)

    def forward(self, ids):
        return (self.wide(ids) + self.mlp(self.deep(ids))).squeeze(1)


def run():
    dist.init_process_group(backend="gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ids, y = encode(synth_log(4096, 11))
    vids, vy = encode(synth_log(1024, 12))

    torch.manual_seed(0)
    model = DistributedDataParallel(ClickModel())
    optim = torch.optim.Adagrad(model.parameters(), lr=0.1)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(3):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(epoch))
        mine = order[rank::world]
        for chunk in mine.split(BATCH):
            optim.zero_grad()
            bce(model(ids[chunk]), y[chunk]).backward()
            optim.step()
        with torch.no_grad():
            part = slice(rank, None, world)
            hit = ((model.module(vids[part]) > 0).float() == vy[part]).sum()
        dist.all_reduce(hit)
        if rank == 0:
            print(f"epoch {epoch}: val acc {hit.item() / len(vy):.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "clicks.pt")
    dist.destroy_process_group()


run()
