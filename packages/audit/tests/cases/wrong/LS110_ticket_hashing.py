"""Routing of support tickets: hashed uni- and bigrams, EmbeddingBag, linear head."""
import random

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

BUCKETS = 2048
TOPICS = {
    "billing": "invoice refund charge card payment receipt price tax".split(),
    "network": "router wifi latency packet cable signal outage ping".split(),
    "account": "password login email reset profile username token locked".split(),
}
FILLER = "please help my the is not since yesterday again still and with".split()


def make_tickets(n, seed):
    rng = random.Random(seed)
    names = sorted(TOPICS)
    rows = []
    for _ in range(n):
        label = rng.randrange(len(names))
        words = rng.choices(FILLER, k=6) + rng.choices(TOPICS[names[label]], k=3)
        rng.shuffle(words)
        rows.append((" ".join(words), label))
    return rows


def featurize(text):
    words = text.split()
    grams = words + [f"{a}_{b}" for a, b in zip(words, words[1:])]
    return [hash(g) % BUCKETS for g in grams]


def collate(rows):
    ids, offsets, labels = [], [], []
    for text, label in rows:
        offsets.append(len(ids))
        ids.extend(featurize(text))
        labels.append(label)
    return torch.tensor(ids), torch.tensor(offsets), torch.tensor(labels)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, 16, mode="mean")
        self.out = nn.Linear(16, len(TOPICS))

    def forward(self, ids, offsets):
        return self.out(self.bag(ids, offsets))


def accuracy(accelerator, model, loader):
    model.eval()
    hits = torch.zeros(2)
    with torch.no_grad():
        for ids, offsets, labels in loader:
            ok = accelerator.gather_for_metrics(model(ids, offsets).argmax(1) == labels)
            hits += torch.tensor([ok.sum().item(), ok.numel()])
    return (hits[0] / hits[1]).item()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(4)
    train = DataLoader(make_tickets(768, 1), batch_size=16, shuffle=True, collate_fn=collate)
    valid = DataLoader(make_tickets(128, 2), batch_size=16, collate_fn=collate)
    model = Router()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
    for epoch in range(3):
        model.train()
        for ids, offsets, labels in train:
            loss = nn.functional.cross_entropy(model(ids, offsets), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        acc = accuracy(accelerator, model, valid)
        accelerator.print(f"epoch {epoch} valid accuracy {acc:.3f}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "router.pt")


if __name__ == "__main__":
    main()
