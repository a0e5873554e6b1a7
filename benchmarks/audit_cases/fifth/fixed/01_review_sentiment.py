"""Bag-of-embeddings sentiment classifier for short product reviews."""
import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

GOOD = "great wonderful sturdy lovely excellent reliable smooth perfect bright quick".split()
BAD = "awful broken flimsy noisy terrible slow cracked useless dull faulty".split()
FILL = ("the a this that box battery handle screen cable it was is very quite seller "
        "arrived after week price paid colour size fits kitchen garden desk phone").split()


def write_reviews(n, seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        label = rng.randint(0, 1)
        tone = GOOD if label else BAD
        words = [rng.choice(FILL) for _ in range(rng.randint(6, 14))]
        for _ in range(rng.randint(1, 3)):
            words.insert(rng.randrange(len(words)), rng.choice(tone))
        rows.append((" ".join(words), label))
    return rows


def build_vocab(rows):
    words = set()
    for text, _ in rows:
        words.update(text.split())
    vocab = {"<pad>": 0, "<unk>": 1}
    for w in sorted(words):
        vocab[w] = len(vocab)
    return vocab


class Reviews(Dataset):
    def __init__(self, rows, vocab, max_len=20):
        self.rows, self.vocab, self.max_len = rows, vocab, max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        text, label = self.rows[i]
        ids = [self.vocab.get(w, 1) for w in text.split()][: self.max_len]
        ids += [0] * (self.max_len - len(ids))
        return torch.tensor(ids), torch.tensor(label)


class Classifier(nn.Module):
    def __init__(self, n_words, dim=24):
        super().__init__()
        self.emb = nn.Embedding(n_words, dim, padding_idx=0)
        self.fc = nn.Linear(dim, 2)

    def forward(self, ids):
        mask = (ids > 0).unsqueeze(-1)
        h = (self.emb(ids) * mask).sum(1) / mask.sum(1)
        return self.fc(h)


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    totals = torch.zeros(2)
    for ids, y in loader:
        totals[0] += (net(ids).argmax(1) == y).sum()
        totals[1] += y.numel()
    dist.all_reduce(totals)
    net.train()
    return (totals[0] / totals[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    train_rows, test_rows = write_reviews(1600, seed=1), write_reviews(401, seed=2)
    vocab = build_vocab(train_rows)
    train_set, test_set = Reviews(train_rows, vocab), Reviews(test_rows, vocab)
    sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=64)

    model = DDP(Classifier(len(vocab)))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for ids, y in train_loader:
            loss = F.cross_entropy(model(ids), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = evaluate(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.4f}  test accuracy {acc:.4f}")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "vocab": vocab}, "sentiment.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
