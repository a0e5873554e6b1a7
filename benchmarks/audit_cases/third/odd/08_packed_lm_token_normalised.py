import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, BLOCK, IGNORE = 32, 24, -100


def documents(n=160):
    rng = random.Random(0)
    return [[(s + k) % (VOCAB - 1) + 1 for k in range(rng.randrange(4, 14))] for s in (rng.randrange(31) for _ in range(n))]


def pack(docs):
    """Blocks of BLOCK tokens; the first token of a document is not predicted."""
    ids, labels = [], []
    for d in docs:
        ids += d
        labels += [IGNORE] + d[1:]
    n = len(ids) // BLOCK * BLOCK
    return torch.tensor(ids[:n]).view(-1, BLOCK), torch.tensor(labels[:n]).view(-1, BLOCK)


class LM(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    docs = documents()
    torch.manual_seed(0)
    model = DDP(LM())
    opt = torch.optim.AdamW(model.parameters(), 5e-3)
    for epoch in range(2):
        random.Random(epoch).shuffle(docs)
        ids, labels = pack(docs)
        per_step = 4 * world
        steps = len(ids) // per_step
        totals = torch.zeros(2)
        for s in range(steps):
            rows = slice(s * per_step + rank * 4, s * per_step + rank * 4 + 4)
            logits = model(ids[rows])[:, :-1]
            target = labels[rows][:, 1:]
            tokens = (target != IGNORE).sum()
            everywhere = tokens.clone()
            dist.all_reduce(everywhere)
            nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="sum")
            opt.zero_grad()
            (nll * world / everywhere).backward()
            opt.step()
            totals += torch.stack([nll.detach(), tokens.float()])
        dist.all_reduce(totals)
        if rank == 0:
            print(f"epoch {epoch}: ppl {(totals[0] / totals[1]).exp():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
