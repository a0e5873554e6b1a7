"""Intent classification of short requests with an averaged-embedding model."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PHRASES = {
    "play_music": ["play some jazz", "put on a song", "start my playlist", "turn up the music"],
    "set_alarm": ["wake me at seven", "set an alarm", "alarm for tomorrow", "remind me early"],
    "weather": ["will it rain today", "how cold is it", "weather this weekend", "do i need an umbrella"],
    "lights_on": ["switch on the lamp", "lights on please", "brighten the kitchen", "light the hall"],
    "book_table": ["book a table for two", "reserve dinner tonight", "find a restaurant", "table by the window"],
    "send_money": ["transfer ten euros", "pay my rent", "send money to anna", "settle the bill"],
    "find_route": ["how do i get home", "fastest way to work", "route to the station", "avoid the highway"],
    "call_person": ["call my mother", "dial the office", "phone anna", "ring the doctor"],
}
FILLER = ["please", "now", "could you", "hey", "thanks", "quickly"]


def make_corpus(n, seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        intent = rng.choice(list(PHRASES))
        words = rng.choice(PHRASES[intent]).split()
        words += rng.sample(FILLER, 2)
        rng.shuffle(words)
        rows.append((" ".join(words), intent))
    return rows


class Intents(Dataset):
    def __init__(self, rows, vocab, labels, length=10):
        self.rows, self.vocab, self.labels, self.length = rows, vocab, labels, length

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        text, intent = self.rows[i]
        ids = [self.vocab.get(w, 1) for w in text.split()][: self.length]
        ids += [0] * (self.length - len(ids))
        return torch.tensor(ids), self.labels[intent]


class BagOfWords(nn.Module):
    def __init__(self, vocab_size, n_labels, dim=48):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab_size, dim, mode="mean", padding_idx=0)
        self.fc = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, n_labels))

    def forward(self, ids):
        return self.fc(self.embed(ids))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    rows = make_corpus(1600, seed=1)
    vocab = {"<pad>": 0, "<unk>": 1}
    for text, _ in rows:
        for word in text.split():
            vocab.setdefault(word, len(vocab))
    labels = {name: i for i, name in enumerate(set(intent for _, intent in rows))}

    train = Intents(rows, vocab, labels)
    sampler = DistributedSampler(train, shuffle=True, seed=0)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = DDP(BagOfWords(len(vocab), len(labels)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(4):
        sampler.set_epoch(epoch)
        stats = torch.zeros(3)
        for ids, target in loader:
            out = model(ids)
            loss = criterion(out, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item() * len(target), (out.argmax(1) == target).sum().item(), len(target)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: loss {stats[0] / stats[2]:.4f} train acc {stats[1] / stats[2]:.3f}")

    if rank == 0:
        torch.save({"model": model.module.state_dict(), "vocab": vocab, "labels": labels}, "intents.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
