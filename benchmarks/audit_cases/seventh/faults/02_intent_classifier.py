"""Bag-of-words intent classifier trained from a CSV file with DDP."""
import csv
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

INTENTS = {
    "weather": "rain sun forecast cloudy temperature umbrella",
    "music": "song play volume album artist track",
    "alarm": "wake morning alarm snooze clock ring",
    "shopping": "buy order cart milk bread price",
    "travel": "flight hotel ticket train book airport",
    "smalltalk": "hello how thanks joke nice morning",
    "news": "headline politics today article report sport",
    "lights": "lamp bright dim kitchen switch off",
}
FILLER = "please can you the a me now for in my".split()


def write_csv(path, n=1600):
    rng = random.Random(7)
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["text", "intent"])
        for _ in range(n):
            intent = rng.choice(list(INTENTS))
            words = rng.choices(INTENTS[intent].split(), k=3) + rng.choices(FILLER, k=3)
            rng.shuffle(words)
            out.writerow([" ".join(words), intent])


class IntentDataset(Dataset):
    def __init__(self, path):
        with open(path) as f:
            rows = list(csv.DictReader(f))
        words = sorted({w for r in rows for w in r["text"].split()})
        self.vocab = {w: i for i, w in enumerate(words)}
        self.classes = list(set(r["intent"] for r in rows))
        self.class_to_id = {c: i for i, c in enumerate(self.classes)}
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        ids = torch.tensor([self.vocab[w] for w in row["text"].split()])
        return ids, self.class_to_id[row["intent"]]


class Classifier(nn.Module):
    def __init__(self, n_words, n_classes):
        super().__init__()
        self.emb = nn.EmbeddingBag(n_words, 32)
        self.out = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, n_classes))

    def forward(self, ids):
        return self.out(self.emb(ids))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        write_csv("intents.csv")
    dist.barrier()

    torch.manual_seed(1)
    data = IntentDataset("intents.csv")
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DDP(Classifier(len(data.vocab), len(data.classes)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(3):
        sampler.set_epoch(epoch)
        stats = torch.zeros(3)
        for ids, target in loader:
            logits = model(ids)
            loss = loss_fn(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item() * len(target),
                                   (logits.argmax(1) == target).sum().item(), len(target)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {stats[0] / stats[2]:.3f} acc {stats[1] / stats[2]:.3f}")

    if rank == 0:
        torch.save({"model": model.module.state_dict(), "classes": data.classes,
                    "vocab": data.vocab}, "intent.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
