"""Character model of made-up names; the loss is the mean over all characters of all processes and micro-batches."""
import math
import random
from contextlib import nullcontext
from itertools import islice

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

CHARS = "^$abdeiklmnorstu"
PAD, ACCUM = -100, 4


def make_names(n, seed):
    rng = random.Random(seed)
    syllables = ["ka", "ri", "do", "men", "tu", "sel", "bra", "ni", "lor", "ste"]
    return ["^" + "".join(rng.choice(syllables) for _ in range(rng.randint(1, 6))) + "$" for _ in range(n)]


def collate(names):
    width = max(map(len, names)) - 1
    x = torch.zeros(len(names), width, dtype=torch.long)
    y = torch.full((len(names), width), PAD)
    for row, name in enumerate(names):
        ids = torch.tensor([CHARS.index(c) for c in name])
        x[row, : len(ids) - 1], y[row, : len(ids) - 1] = ids[:-1], ids[1:]
    return x, y


class CharGRU(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(len(CHARS), dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, len(CHARS))

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def nll_sum(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(77)
    loader = DataLoader(make_names(1024, 1), batch_size=16, shuffle=True, collate_fn=collate)
    model = CharGRU()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(3):
        stream, nll, chars = iter(loader), torch.zeros(()), 0
        while group := list(islice(stream, ACCUM)):
            count = sum((y != PAD).sum() for _, y in group)
            count = accelerator.reduce(count, reduction="sum").item()
            for i, (x, y) in enumerate(group):
                last = i == len(group) - 1
                with nullcontext() if last else accelerator.no_sync(model):
                    loss = nll_sum(model(x), y)
                    # DDP takes the mean over processes; times num_processes gives the sum, over count the mean per character
                    accelerator.backward(loss * accelerator.num_processes / count)
                nll += loss.detach()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            chars += count
        nll = accelerator.reduce(nll, reduction="sum").item() / chars
        accelerator.print(f"epoch {epoch}: nll {nll:.3f} perplexity {math.exp(nll):.2f} over {chars} characters")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "names.pt")


if __name__ == "__main__":
    main()
