"""Click prediction from a stream of json-lines files."""
import json
import random
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

DATA = Path("clicks")
N_FILES, ROWS, FIELDS, BUCKETS = 8, 160, 5, 50


def write_files():
    rng = random.Random(0)
    weight = [[rng.gauss(0, 1) for _ in range(BUCKETS)] for _ in range(FIELDS)]
    DATA.mkdir(exist_ok=True)
    for n in range(N_FILES):
        with open(DATA / f"part-{n:03d}.jsonl", "w") as f:
            for _ in range(ROWS):
                feats = [rng.randrange(BUCKETS) for _ in range(FIELDS)]
                score = sum(weight[k][v] for k, v in enumerate(feats))
                f.write(json.dumps({"x": feats, "click": int(score + rng.gauss(0, 1) > 0)}) + "\n")


class ClickStream(IterableDataset):
    def __init__(self, files):
        self.files = files

    def __iter__(self):
        for path in self.files:
            with open(path) as f:
                for line in f:
                    row = json.loads(line)
                    yield torch.tensor(row["x"]), torch.tensor(float(row["click"]))


class FactorModel(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.register_buffer("offset", torch.arange(FIELDS) * BUCKETS)
        self.linear = nn.Embedding(FIELDS * BUCKETS, 1)
        self.factors = nn.Embedding(FIELDS * BUCKETS, dim)
        nn.init.normal_(self.factors.weight, std=0.05)

    def forward(self, x):
        idx = x + self.offset
        v = self.factors(idx)
        pair = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(-1)
        return self.linear(idx).sum(dim=(1, 2)) + pair


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    if accelerator.is_main_process:
        write_files()
    accelerator.wait_for_everyone()

    files = sorted(DATA.glob("part-*.jsonl"))
    my_files = files[accelerator.process_index :: accelerator.num_processes]
    loader = DataLoader(ClickStream(my_files), batch_size=16)

    model = FactorModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss_fn = nn.BCEWithLogitsLoss()

    for epoch in range(3):
        model.train()
        total, steps = torch.zeros(()), 0
        for x, click in loader:
            loss = loss_fn(model(x), click)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            steps += 1
        mean = accelerator.reduce(total / steps, reduction="mean").item()
        accelerator.print(f"epoch {epoch}: {steps} steps, log loss {mean:.4f}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "fm.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
