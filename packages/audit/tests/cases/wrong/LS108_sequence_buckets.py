"""Variable length sequence tagging; batches are built from sequences of similar length."""
import random

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

PAD = 0


class Sequences(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(5, 40, (1,), generator=g))
            tokens = torch.randint(1, 30, (length,), generator=g)
            tags = (tokens + torch.roll(tokens, 1)) % 4
            self.items.append((tokens, tags))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]

    def lengths(self):
        return [len(t) for t, _ in self.items]


class LengthBucketSampler(Sampler):
    """Shuffles the data, then sorts by length inside large chunks."""

    def __init__(self, lengths, chunk):
        self.lengths = lengths
        self.chunk = chunk

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        order = list(range(len(self.lengths)))
        random.shuffle(order)
        for start in range(0, len(order), self.chunk):
            part = order[start : start + self.chunk]
            yield from sorted(part, key=lambda i: self.lengths[i])


def collate(batch):
    tokens = pad_sequence([t for t, _ in batch], batch_first=True, padding_value=PAD)
    tags = pad_sequence([y for _, y in batch], batch_first=True, padding_value=-100)
    return tokens, tags


class Tagger(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.emb = nn.Embedding(30, dim, padding_idx=PAD)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, 4)

    def forward(self, tokens):
        return self.out(self.rnn(self.emb(tokens))[0])


def main():
    accelerator = Accelerator(cpu=True)
    train_set = Sequences(640, seed=0)
    sampler = LengthBucketSampler(train_set.lengths(), chunk=160)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler, collate_fn=collate)

    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(3):
        model.train()
        total = torch.zeros(())
        for tokens, tags in loader:
            logits = model(tokens)
            nll = F.cross_entropy(logits.transpose(1, 2), tags, ignore_index=-100, reduction="none")
            loss = (nll.sum(1) / (tags != -100).sum(1)).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        mean = accelerator.reduce(total / len(loader), reduction="mean").item()
        accelerator.print(f"epoch {epoch}: loss {mean:.4f} over {len(loader)} batches")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "tagger.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
