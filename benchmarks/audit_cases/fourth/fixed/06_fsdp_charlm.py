"""Character model on made-up recipes, sharded with fully_shard."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
CTX, BATCH, MAX_NORM = 32, 16, 0.25
CHARS = "abcdefghijklmnopqrstuvwxyz ,.\n"
STOI = {c: i for i, c in enumerate(CHARS)}


def recipes(n, seed):
    r = random.Random(seed)
    verbs, things = ["chop", "boil", "fry", "mix"], ["onions", "rice", "beans", "eggs", "a carrot"]
    s = "".join(f"{r.choice(verbs)} {r.choice(things)}, then {r.choice(verbs)} {r.choice(things)}.\n" for _ in range(n))
    return torch.tensor([STOI[c] for c in s])


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0])
        return x + self.ff(self.n2(x))


class CharLM(nn.Module):
    def __init__(self, d=32, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(len(CHARS), d), nn.Embedding(CTX, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.head = nn.Linear(d, len(CHARS))

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def clip_gradients(params, max_norm):
    shards = [p.grad.to_local() for p in params if p.grad is not None]
    square = torch.stack([s.float().pow(2).sum() for s in shards]).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for s in shards:
        s.mul_(scale)
    return norm


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = CharLM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    text, held = recipes(600, 1), recipes(60, 2)
    gen = torch.Generator().manual_seed(50 + rank)
    for step in range(1, 41):
        at = torch.randint(0, len(text) - CTX - 1, (BATCH,), generator=gen)
        seq = torch.stack([text[i:i + CTX + 1] for i in at.tolist()])
        loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        norm = clip_gradients(list(model.parameters()), MAX_NORM)
        opt.step()
        if step % 10 == 0:
            with torch.no_grad():
                v = held[:CTX * 40 + 1]
                val = F.cross_entropy(model(v[:-1].view(40, CTX)).flatten(0, 1), v[1:])
            print(f"[{rank}] step {step} held-out {val.item():.4f} norm {norm.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
