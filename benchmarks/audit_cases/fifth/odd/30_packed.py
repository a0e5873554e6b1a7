import contextlib
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

from accelerate import Accelerator
from accelerate.utils import set_seed

VOCAB, BUDGET, STEPS_PER_EPOCH, DIM = 24, 96, 10, 32


def documents(n, seed):
    rng = random.Random(seed)
    docs = []
    for _ in range(n):
        a, b, x = rng.randint(1, 5), rng.randint(0, 9), rng.randrange(VOCAB)
        doc = []
        for _ in range(rng.choice([5, 8, 12, 30, 45])):
            doc.append(x)
            x = (a * x + b) % VOCAB
        docs.append(doc)
    return docs


def pack(docs):
    """Greedy packing: fewer or more packs come out, depending on the lengths."""
    packs, current, size = [], [], 0
    for doc in docs:
        if size + len(doc) > BUDGET:
            packs.append(current)
            current, size = [], 0
        current.append(doc)
        size += len(doc)
    if current:
        packs.append(current)
    return packs


def to_tensors(docs):
    ids = torch.tensor([t for d in docs for t in d])
    seg = torch.tensor([i for i, d in enumerate(docs) for _ in d])
    pos = torch.tensor([p for d in docs for p in range(len(d))])
    same = seg[:, None] == seg[None, :]
    mask = same & torch.ones_like(same).tril()
    target = torch.full_like(ids, -100)
    target[:-1] = torch.where(seg[1:] == seg[:-1], ids[1:], target[:-1])
    return ids, pos, mask, target


class PackedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids, pos, mask):
        h = self.tok(ids) + self.pos(pos)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        att = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None])[0]
        h = h + self.proj(att)
        return self.head(h + self.mlp(h))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(44)
    model = PackedLM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    docs = documents(400, seed=0)
    rank, world = accelerator.process_index, accelerator.num_processes

    for epoch in range(3):
        order = random.Random(epoch).sample(range(len(docs)), len(docs))
        packs = pack([docs[i] for i in order[rank::world]])
        nll, count = 0.0, 0
        for step in range(STEPS_PER_EPOCH):
            micro = [to_tensors(p) for p in packs[step::STEPS_PER_EPOCH]]
            local = sum((target != -100).sum().item() for *_, target in micro)
            tokens = accelerator.reduce(torch.tensor(float(local)), reduction="sum").item()
            optimizer.zero_grad()
            for i, (ids, pos, mask, target) in enumerate(micro):
                last = i == len(micro) - 1
                with contextlib.nullcontext() if last else accelerator.no_sync(model):
                    loss_sum = F.cross_entropy(model(ids, pos, mask), target, ignore_index=-100, reduction="sum")
                    accelerator.backward(loss_sum * world / tokens)
                nll += loss_sum.item()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            count += local
        nll, count, n_packs = accelerator.reduce(torch.tensor([nll, count, len(packs)]), reduction="sum").tolist()
        accelerator.print(f"epoch {epoch} nll {nll / count:.4f} over {count:.0f} tokens in {n_packs:.0f} packs")
    accelerator.end_training()


if __name__ == "__main__":
    main()
