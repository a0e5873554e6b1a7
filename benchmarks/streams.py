"""What a stream costs beside a plain loop over the same IterableDataset, and beside the same samples by index.

    python benchmarks/streams.py [--samples 20000] [--rounds 5]

Lines of JSON are read from a file, parsed, and trained on in batches of 64 by one process. Told is the processor time
by sample, the median of rounds in turns: of a loop over torch's DataLoader; of Lockstep on the stream; of Lockstep on a
list of the lines. `reading` is what a rank spends on a sample that belongs to another rank: it is read, and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

import lockstep

BATCH = 64


class Lines(IterableDataset):
    """The lines of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self):
        with self.path.open("rb") as file:
            yield from file


def parsed(line):
    row = json.loads(line)
    return torch.tensor(row["x"]), torch.tensor([row["y"]])


class Parsed(Lines):
    """The same, parsed as a plain script does it."""

    def __iter__(self):
        return map(parsed, super().__iter__())


def new_model():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


class Readings(lockstep.Task):
    """Regression on the lines."""

    def __init__(self, data):
        self.data = data

    def model(self):
        return new_model()

    def train_data(self):
        return self.data

    def prepare(self, line, epoch, training):
        return parsed(line)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum()


def plain(path, steps, folder):
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = iter(DataLoader(Parsed(path), batch_size=BATCH))
    for _ in range(steps):
        inputs, targets = next(loader)
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()


def trained(data, steps, folder):
    config = {"batch": {"global": BATCH}, "train": {"steps": steps}, "data": {"workers": 0}, "device": "cpu"}
    config["log"] = {"writers": ["json_lines"], "every_steps": 1000, "flops": False}
    lockstep.Trainer(config, run_dir=folder, quiet=True).fit(Readings(data))


def on_stream(path, steps, folder):
    trained(lockstep.Stream(Lines(path)), steps, folder)


def by_index(path, steps, folder):
    trained(path.read_bytes().splitlines(), steps, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = options.samples // BATCH
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "lines.jsonl")
        rows = torch.randn(steps * BATCH, 16).tolist()
        path.write_text("".join(json.dumps({"x": row, "y": sum(row)}) + "\n" for row in rows))
        found: dict[str, list[float]] = {}
        for number in range(options.rounds + 1):  # the first round warms up
            for loop in (plain, on_stream, by_index):
                begun = time.process_time()
                loop(path, steps, Path(name, f"{loop.__name__}-{number}"))
                found.setdefault(loop.__name__, []).append((time.process_time() - begun) / (steps * BATCH) * 1e6)
            stream = lockstep.Stream(Lines(path))
            begun = time.process_time()
            stream[steps * BATCH - 1]
            found.setdefault("reading", []).append((time.process_time() - begun) / (steps * BATCH) * 1e6)
        for name, times in found.items():
            print(f"{name:<10} {statistics.median(times[1:]):7.1f} us by sample, of {len(times) - 1} rounds")
        ratios = [ours / theirs for ours, theirs in zip(found["on_stream"][1:], found["plain"][1:], strict=True)]
        print(f"on_stream / plain: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
