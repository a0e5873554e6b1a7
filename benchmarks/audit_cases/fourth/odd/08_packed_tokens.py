"""Tagging of packed sequences. Batches are cut by tokens, so ranks hold different numbers of sequences and tokens;
the loss is a sum over tokens divided by the number of tokens on all ranks."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

torch.set_num_threads(1)
VOCAB, TAGS, BUDGET = 40, 3, 220


def corpus(n, seed):
    r = random.Random(seed)
    out = []
    for _ in range(n):
        ids = [r.randrange(VOCAB) for _ in range(r.randint(3, 40))]
        tags = [(a + b) % TAGS for a, b in zip([0] + ids[:-1], ids)]
        out.append((torch.tensor(ids), torch.tensor(tags)))
    return out


def batches(docs, epoch, rank, world):
    order = list(range(len(docs)))
    random.Random(epoch).shuffle(order)
    mine, out, size = [[]], None, 0
    for i in order[rank::world]:
        if size + len(docs[i][0]) > BUDGET:
            mine.append([])
            size = 0
        mine[-1].append(i)
        size += len(docs[i][0])
    n = torch.tensor(len(mine))
    dist.all_reduce(n, op=dist.ReduceOp.MIN)     # as many batches on each rank
    for b in mine[:n.item()]:
        yield [docs[i] for i in b]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(VOCAB, 24), nn.GRU(24, 32)
        self.out = nn.Linear(32, TAGS)

    def forward(self, seqs):
        packed = pack_sequence([self.emb(s) for s in seqs], enforce_sorted=False)
        h, lens = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(torch.cat([h[i, :n] for i, n in enumerate(lens.tolist())]))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    docs, held = corpus(300, 1), corpus(60, 2)
    model = DDP(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):
        for batch in batches(docs, epoch, rank, world):
            target = torch.cat([t for _, t in batch])
            tokens = torch.tensor(float(len(target)))
            dist.all_reduce(tokens)
            loss = F.cross_entropy(model([s for s, _ in batch]), target, reduction="sum") * world / tokens
            opt.zero_grad()
            loss.backward()
            opt.step()
        part = held[rank::world]
        with torch.no_grad():
            target = torch.cat([t for _, t in part])
            hit = (model.module([s for s, _ in part]).argmax(1) == target).sum()
        t = torch.stack([hit, torch.tensor(len(target))])
        dist.all_reduce(t)
        if rank == 0:
            print(f"epoch {epoch} tokens right {t[0] / t[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
