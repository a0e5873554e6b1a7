"""Sentiment-like classification of token sequences with a small transformer encoder."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

VOCAB, LENGTH, EPOCHS, BATCH = 60, 24, 3, 16


def make_split(n, seed):
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (n, LENGTH), generator=gen)
    score = (tokens < 20).sum(1) - (tokens >= 40).sum(1)
    return TensorDataset(tokens, (score > 0).long())


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(torch.zeros(LENGTH, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(dim, 2)

    def forward(self, tokens):
        return self.head(self.body(self.tok(tokens) + self.pos).mean(1))


def warmup_cosine(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return step / max(1, warmup)
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(17)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    train_loader = DataLoader(make_split(640, 1), batch_size=BATCH, shuffle=True)
    val_loader = DataLoader(make_split(128, 2), batch_size=BATCH)
    model, optimizer, train_loader, val_loader = accelerator.prepare(model, optimizer, train_loader, val_loader)

    total_steps = EPOCHS * len(train_loader)
    scheduler = warmup_cosine(optimizer, total_steps // 10, total_steps)

    for epoch in range(EPOCHS):
        model.train()
        for tokens, labels in train_loader:
            loss = F.cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        hits, seen = 0, 0
        for tokens, labels in val_loader:
            with torch.no_grad():
                preds = model(tokens).argmax(-1)
            preds, labels = accelerator.gather_for_metrics((preds, labels))
            hits += (preds == labels).sum().item()
            seen += labels.numel()
        accelerator.print(f"epoch {epoch} acc {hits / seen:.3f} lr {scheduler.get_last_lr()[0]:.2e}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "encoder.pt")


if __name__ == "__main__":
    main()
