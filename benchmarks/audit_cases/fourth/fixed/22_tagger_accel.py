import argparse

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup

torch.set_num_threads(1)


class Tagger(nn.Module):
    """BiLSTM sequence tagger."""

    def __init__(self, vocab=50, tags=5, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, tags)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 50, (n, 12), generator=g)
    y = (x + torch.roll(x, 1, dims=1)) % 5
    return TensorDataset(x, y)


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--batch_size", type=int, default=8)
    p.add_argument("--warmup", type=float, default=0.1)
    return p.parse_args()


args = parse_args()
accelerator = Accelerator(cpu=True)
set_seed(3)

model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
train_dl = DataLoader(corpus(256, 0), batch_size=args.batch_size, shuffle=True, drop_last=True)
dev_dl = DataLoader(corpus(64, 1), batch_size=args.batch_size)
model, optimizer, train_dl, dev_dl = accelerator.prepare(model, optimizer, train_dl, dev_dl)

max_train_steps = args.epochs * len(train_dl)
scheduler = get_cosine_schedule_with_warmup(
    optimizer,
    num_warmup_steps=int(args.warmup * max_train_steps) * accelerator.num_processes,
    num_training_steps=max_train_steps * accelerator.num_processes,
)
scheduler = accelerator.prepare(scheduler)

loss_fn = nn.CrossEntropyLoss()
for epoch in range(args.epochs):
    model.train()
    for x, y in train_dl:
        optimizer.zero_grad()
        loss = loss_fn(model(x).flatten(0, 1), y.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    model.eval()
    hits = total = 0
    with torch.no_grad():
        for x, y in dev_dl:
            pred, gold = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            hits += (pred == gold).sum().item()
            total += gold.numel()
    accelerator.print(f"[{epoch}] lr {scheduler.get_last_lr()[0]:.6f} train {loss.item():.4f} dev acc {hits / total:.4f}")
