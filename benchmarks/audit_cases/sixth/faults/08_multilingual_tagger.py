"""Multilingual tagger: shared trunk, one output layer per language, no wrapper class.

Each worker draws its batches from one language at a time.
"""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

LANGS = ["da", "fi", "sw"]
VOCAB, TAGS, LENGTH = 120, 6, 10


def load_language(lang, n=400):
    g = torch.Generator().manual_seed(50 + LANGS.index(lang))
    tag_of = torch.randint(0, TAGS, (VOCAB,), generator=g)
    words = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    return words, tag_of[words]


class Tagger(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.heads = nn.ModuleDict({lang: nn.Linear(dim, TAGS) for lang in LANGS})

    def forward(self, words, lang):
        h = self.emb(words)
        h = h + F.relu(self.conv(h.transpose(1, 2))).transpose(1, 2)
        return self.heads[lang](h)


def broadcast_parameters(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def average_gradients(model):
    world = dist.get_world_size()
    for p in model.parameters():
        if p.grad is None:
            continue
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= world


@torch.no_grad()
def accuracy(model, corpora):
    scores = {}
    for lang, (words, tags) in corpora.items():
        predicted = model(words[-80:], lang).argmax(-1)
        scores[lang] = (predicted == tags[-80:]).float().mean().item()
    return scores


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)

    corpora = {lang: load_language(lang) for lang in LANGS}
    model = Tagger()
    broadcast_parameters(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    draw = random.Random(700 + rank)
    for epoch in range(3):
        model.train()
        total = torch.zeros(1)
        for _ in range(60):
            lang = draw.choice(LANGS)
            words, tags = corpora[lang]
            rows = torch.tensor(draw.sample(range(len(words) - 80), 16))
            logits = model(words[rows], lang)
            loss = F.cross_entropy(logits.flatten(0, 1), tags[rows].flatten())
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        model.eval()
        if rank == 0:
            scores = " ".join(f"{k}={v:.2f}" for k, v in accuracy(model, corpora).items())
            print(f"epoch {epoch} loss {total.item() / (60 * world):.3f} dev acc {scores}", flush=True)

    if rank == 0:
        torch.save(model.state_dict(), "tagger.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
