import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

GOOD = "great fine lovely superb bright happy".split()
BAD = "awful poor dull broken sad grim".split()
REST = "the a movie plot actor scene was is very and".split()


def make_reviews(n, seed):
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        label = rng.randrange(2)
        words = rng.choices(REST, k=6) + rng.choices(GOOD if label else BAD, k=2)
        rng.shuffle(words)
        out.append((" ".join(words), label))
    return out


def build_vocab(texts):
    words = set()
    for t in texts:
        words.update(t.split())
    return {w: i for i, w in enumerate(words)}


class ReviewDataset(Dataset):
    def __init__(self, reviews, vocab):
        self.reviews, self.vocab = reviews, vocab

    def __len__(self):
        return len(self.reviews)

    def __getitem__(self, i):
        text, label = self.reviews[i]
        return torch.tensor([self.vocab[w] for w in text.split()]), label


class BagOfWords(nn.Module):
    def __init__(self, size, dim=16):
        super().__init__()
        self.emb = nn.EmbeddingBag(size, dim)
        self.out = nn.Linear(dim, 2)

    def forward(self, tokens):
        return self.out(self.emb(tokens))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=0.05)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    reviews = make_reviews(128, 1)
    vocab = build_vocab(t for t, _ in reviews)
    ds = ReviewDataset(reviews, vocab)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler)
    model = DDP(BagOfWords(len(vocab)))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stat = torch.zeros(2)
        for tokens, label in loader:
            logits = model(tokens)
            opt.zero_grad()
            nn.functional.cross_entropy(logits, label).backward()
            opt.step()
            stat += torch.tensor([(logits.argmax(1) == label).sum(), len(label)])
        dist.all_reduce(stat)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} train acc {stat[0] / stat[1]:.3f}")
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "vocab": vocab}, "bow.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
