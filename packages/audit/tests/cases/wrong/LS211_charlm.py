import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

ALPHABET = "abcdefghijklmnopqrstuvwxyz "
BOS = len(ALPHABET)
VOCAB = len(ALPHABET) + 1
IGNORE = -100


def make_corpus(n, seed):
    rng = random.Random(seed)
    syllables = ["ka", "to", "mi", "ra", "ne", "sol", "ven", "du", "li", "pran"]
    lines = []
    for _ in range(n):
        words = []
        for _ in range(rng.randint(1, 9)):
            words.append("".join(rng.choice(syllables) for _ in range(rng.randint(1, 3))))
        lines.append(" ".join(words))
    return lines


def encode(line):
    return torch.tensor([BOS] + [ALPHABET.index(c) for c in line])


def collate(lines):
    ids = [encode(line) for line in lines]
    inputs = pad_sequence([s[:-1] for s in ids], batch_first=True, padding_value=0)
    targets = pad_sequence([s[1:] for s in ids], batch_first=True, padding_value=IGNORE)
    return inputs, targets


class GRULM(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, x):
        return self.head(self.rnn(self.emb(x))[0])


@torch.no_grad()
def perplexity(accelerator, model, loader):
    model.eval()
    nll, count = 0.0, 0
    for inputs, targets in loader:
        logits = model(inputs)
        token_nll = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE, reduction="none")
        n = (targets != IGNORE).sum(1)
        per_line, n = accelerator.gather_for_metrics((token_nll.sum(1), n))
        nll += per_line.sum().item()
        count += n.sum().item()
    model.train()
    return torch.tensor(nll / count).exp().item()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(2)

    train_loader = DataLoader(make_corpus(1024, 0), batch_size=16, shuffle=True, drop_last=True, collate_fn=collate)
    valid_loader = DataLoader(make_corpus(150, 1), batch_size=32, collate_fn=collate)
    model = GRULM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(
        model, optimizer, train_loader, valid_loader
    )

    step = 0
    for epoch in range(3):
        for inputs, targets in train_loader:
            logits = model(inputs)
            loss_sum = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
            )
            num_tokens = accelerator.reduce((targets != IGNORE).sum(), reduction="sum")
            loss = loss_sum / num_tokens
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            step += 1
            if step % 16 == 0:
                total = accelerator.reduce(loss_sum.detach(), reduction="sum")
                accelerator.print(f"step {step} loss {(total / num_tokens).item():.4f}")
        ppl = perplexity(accelerator, model, valid_loader)
        accelerator.print(f"epoch {epoch} valid ppl {ppl:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
