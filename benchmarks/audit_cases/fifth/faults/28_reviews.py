import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

GOOD = "great lovely superb charming brilliant fresh funny warm clever moving".split()
BAD = "dull awful boring clumsy stale weak tedious cold shallow messy".split()
FILLER = ("the film plot actor scene story music ending camera script was and with a very "
          "quite rather often never seemed felt looked director cast pace second half").split()


def write_reviews(n, seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        label = rng.randint(0, 1)
        words = [rng.choice(FILLER) for _ in range(rng.randint(6, 14))]
        for _ in range(rng.randint(1, 3)):
            words.insert(rng.randrange(len(words)), rng.choice(GOOD if label else BAD))
        if rng.random() < 0.3:
            words.insert(rng.randrange(len(words)), rng.choice(BAD if label else GOOD))
        rows.append((" ".join(words), label))
    return rows


class Vocab:
    def __init__(self, texts):
        tokens = {w for text in texts for w in text.split()}
        self.itos = ["<pad>", "<unk>"] + list(tokens)
        self.stoi = {w: i for i, w in enumerate(self.itos)}

    def __len__(self):
        return len(self.itos)

    def encode(self, text, length=20):
        ids = [self.stoi.get(w, 1) for w in text.split()][:length]
        return ids + [0] * (length - len(ids))


class BagOfWords(nn.Module):
    def __init__(self, size, dim=24):
        super().__init__()
        self.emb = nn.Embedding(size, dim, padding_idx=0)
        self.out = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, ids):
        mask = (ids != 0).unsqueeze(-1)
        h = (self.emb(ids) * mask).sum(1) / mask.sum(1)
        return self.out(h)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(17)

    train_rows = write_reviews(1280, 0)
    dev_rows = write_reviews(250, 1)
    vocab = Vocab(text for text, _ in train_rows)

    def collate(rows):
        ids = torch.tensor([vocab.encode(text) for text, _ in rows])
        return ids, torch.tensor([label for _, label in rows])

    train_loader = DataLoader(train_rows, batch_size=16, shuffle=True, drop_last=True, collate_fn=collate)
    dev_loader = DataLoader(dev_rows, batch_size=50, collate_fn=collate)
    model = BagOfWords(len(vocab))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer, train_loader, dev_loader = accelerator.prepare(model, optimizer, train_loader, dev_loader)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(3):
        model.train()
        for ids, labels in train_loader:
            loss = loss_fn(model(ids), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        correct = total = 0
        with torch.no_grad():
            for ids, labels in dev_loader:
                pred, ref = accelerator.gather_for_metrics((model(ids).argmax(1), labels))
                correct += (pred == ref).sum().item()
                total += len(ref)
        accelerator.print(f"epoch {epoch} dev accuracy {correct / total:.3f} ({total} reviews)")

    accelerator.wait_for_everyone()
    accelerator.save({"model": accelerator.unwrap_model(model).state_dict(), "vocab": vocab.itos}, "bow.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
