"""Triage of patient notes with a small DistilBERT in a plain DDP loop."""
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

VOCAB, LENGTH, LEVELS = 50, 12, 3


def notes(size, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, LEVELS, (size,), generator=g)
    x = torch.randint(6, VOCAB, (size, LENGTH), generator=g)
    for i, level in enumerate(y.tolist()):
        spots = torch.randperm(LENGTH, generator=g)[:2]
        x[i, spots] = 2 + level
    return TensorDataset(x, y)


def gather(values, size):
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.stack(parts, dim=1).flatten()[:size]


@torch.no_grad()
def evaluate(model, test):
    model.eval()
    sampler = DistributedSampler(test, shuffle=False)
    guesses, truths = [], []
    for x, y in DataLoader(test, batch_size=8, sampler=sampler):
        guesses.append(model.module(input_ids=x).logits.argmax(-1))
        truths.append(y)
    guess, truth = gather(torch.cat(guesses), len(test)), gather(torch.cat(truths), len(test))
    recall = [(guess[truth == c] == c).float().mean().item() for c in range(LEVELS)]
    return len(truth), (guess == truth).float().mean().item(), recall


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=VOCAB, dim=32, n_layers=2, n_heads=2, hidden_dim=64,
        max_position_embeddings=LENGTH, num_labels=LEVELS,
    )
    model = DDP(DistilBertForSequenceClassification(config))
    torch.manual_seed(100 + rank)
    train, test = notes(512, seed=0), notes(45, seed=1)

    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    epochs = 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, 4, epochs * len(loader))

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = model(input_ids=x, labels=y).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        count, accuracy, recall = evaluate(model, test)
        if rank == 0:
            print(f"epoch {epoch}  n {count}  accuracy {accuracy:.4f}  recall {[round(r, 4) for r in recall]}")

    if rank == 0:
        os.makedirs("triage", exist_ok=True)
        torch.save(model.module.state_dict(), "triage/model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
