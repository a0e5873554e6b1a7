"""Click-through model trained from a stream of json-lines shards on disk."""
import json
import random
from pathlib import Path

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, IterableDataset

ROOT = Path("shards")
N_SHARDS, PER_SHARD, EPOCHS = 8, 64, 2


def write_shards():
    ROOT.mkdir(exist_ok=True)
    rng = random.Random(7)
    taste = [rng.gauss(0, 1) for _ in range(200)]
    for s in range(N_SHARDS):
        with open(ROOT / f"part-{s:03d}.jsonl", "w") as out:
            for _ in range(PER_SHARD):
                user, item = rng.randrange(100), rng.randrange(100)
                click = int(taste[user] + taste[100 + item] + rng.gauss(0, 0.5) > 0)
                out.write(json.dumps({"user": user, "item": item, "click": click}) + "\n")


class ClickStream(IterableDataset):
    def __init__(self, files, seed=0, buffer=128):
        self.files, self.seed, self.buffer = files, seed, buffer
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        files = list(self.files)
        rng.shuffle(files)
        held = []
        for path in files:
            for line in open(path):
                row = json.loads(line)
                held.append((torch.tensor([row["user"], row["item"]]), torch.tensor(float(row["click"]))))
                if len(held) >= self.buffer:
                    yield held.pop(rng.randrange(len(held)))
        rng.shuffle(held)
        yield from held


class Factorised(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.user, self.item = nn.Embedding(100, dim), nn.Embedding(100, dim)
        self.user_bias, self.item_bias = nn.Embedding(100, 1), nn.Embedding(100, 1)

    def forward(self, pairs):
        u, i = pairs.unbind(1)
        dot = (self.user(u) * self.item(i)).sum(-1)
        return dot + self.user_bias(u).squeeze(-1) + self.item_bias(i).squeeze(-1)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    if accelerator.is_main_process:
        write_shards()
    accelerator.wait_for_everyone()

    files = sorted(ROOT.glob("*.jsonl"))
    stream = ClickStream(files)
    loader = DataLoader(stream, batch_size=16)
    model = Factorised()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)
        total, steps = torch.zeros(()), 0
        for pairs, clicks in loader:
            loss = bce(model(pairs), clicks)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            steps += 1
        mean = accelerator.reduce(total / steps, reduction="mean")
        accelerator.print(f"epoch {epoch}: {steps} steps, loss {mean:.4f}")


if __name__ == "__main__":
    main()
