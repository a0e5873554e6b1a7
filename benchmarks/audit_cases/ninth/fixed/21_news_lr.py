"""Short news headline classifier (embedding bag + transformer layer) with linear warm-up and decay."""
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup
from accelerate import Accelerator

VOCAB, CLASSES, LENGTH = 400, 6, 16


class HeadlineNet(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(torch.zeros(1, LENGTH, dim))
        self.layer = nn.TransformerEncoderLayer(dim, 4, dim * 2, dropout=0.0, batch_first=True)
        self.out = nn.Linear(dim, CLASSES)

    def forward(self, ids):
        h = self.layer(self.embed(ids) + self.pos)
        return self.out(h.mean(dim=1))


def headlines(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (n,), generator=g)
    ids = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    topical = torch.rand(n, LENGTH, generator=g) < 0.3
    topic_words = labels[:, None] * 40 + torch.randint(0, 40, (n, LENGTH), generator=g)
    return TensorDataset(torch.where(topical, topic_words, ids), labels)


def evaluate(accelerator, model, loader):
    model.eval()
    hits = []
    with torch.no_grad():
        for ids, labels in loader:
            pred = model(ids).argmax(-1)
            pred, labels = accelerator.gather_for_metrics((pred, labels))
            hits.append((pred == labels).float())
    return torch.cat(hits).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=float, default=0.1)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(13)
    train_loader = DataLoader(headlines(1600, 0), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(headlines(320, 1), batch_size=args.batch_size)

    model = HeadlineNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    total_steps = args.epochs * len(train_loader)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )

    scheduler = get_linear_schedule_with_warmup(
        optimizer,
        num_warmup_steps=int(args.warmup * total_steps),
        num_training_steps=total_steps,
    )
    scheduler = accelerator.prepare(scheduler)

    for epoch in range(args.epochs):
        model.train()
        running = 0.0
        for ids, labels in train_loader:
            loss = nn.functional.cross_entropy(model(ids), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            running += accelerator.reduce(loss.detach(), "mean").item()
        accuracy = evaluate(accelerator, model, val_loader)
        accelerator.print(
            f"epoch {epoch} loss {running / len(train_loader):.4f} "
            f"acc {accuracy:.3f} lr {scheduler.get_last_lr()[0]:.2e}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
