"""Time per step of `lockstep.Loop` compared with the plain loop that it replaces, on one process.

    python benchmarks/loop.py [--sizes small large] [--rounds 15] [--profile]

Both train the same MLP with AdamW on batches of 64 samples of an ordinary data set, with `len` and `[index]`. They
alternate in one process; the result is the median over rounds of the ratio of their times. Set-up is not measured. Time
is the processor time of the process with all its threads: neither variant waits, and other programs do not count. The
Loop logs as it does by default; the plain loop logs nothing. `--profile` prints where the Loop spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import sys
import tempfile
import time
from functools import partial

import torch
from harness import header, ratios, row, spread, take_turns
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import lockstep

BATCH = 64
# Hidden width, layers, steps in a round: 70 thousand and 4.3 million parameters.
SIZES = {"small": (256, 1, 200), "large": (1400, 3, 20)}


class Points(Dataset):
    """Inputs and labels of a classification, one sample at a time."""

    def __init__(self, count: int) -> None:
        self.inputs, self.labels = torch.randn(count, 256), torch.randint(10, (count,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.inputs[index], self.labels[index]


def training(hidden: int, layers: int):
    """A model and its optimizer."""
    torch.manual_seed(0)
    sizes = [256, *[hidden] * layers, 10]
    parts = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*parts[:-1])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain(data: Dataset, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One epoch; returns seconds per step."""
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    begun = time.process_time()
    for inputs, labels in loader:
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.process_time() - begun) / len(loader)


def ours(steps, count: int, model: nn.Module) -> float:
    """The next `count` steps of a Loop; returns seconds per step."""
    begun = time.process_time()
    for step in itertools.islice(steps, count):
        for inputs, labels in step:
            loss = cross_entropy(model(inputs), labels)
            step.backward(loss)
    return (time.process_time() - begun) / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    header("network", "plain (ms)", "Loop (ms)", "ratio")
    for size in options.sizes:
        hidden, layers, count = SIZES[size]
        data = Points(count * BATCH)
        with tempfile.TemporaryDirectory() as folder:
            keep, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
            sys.stdout.flush()
            os.dup2(null, 1)  # the Loop's output takes time, but is not shown
            mine, theirs = training(hidden, layers), training(hidden, layers)
            loop = lockstep.Loop(*mine, data, global_batch=BATCH, epochs=options.rounds + 3, run_dir=f"{folder}/run")
            steps = iter(loop)
            ways = {
                "Loop": partial(ours, steps, count, mine[0]),
                "plain": partial(plain, data, *theirs),
            }
            times = take_turns(ways, options.rounds, warm_up=1)
            profile = cProfile.Profile(time.process_time)
            if options.profile:
                profile.runcall(ours, steps, count, mine[0])
            steps.close()
            loop.close()
            sys.stdout.flush()
            os.dup2(keep, 1)
        milliseconds = {name: spread([1e3 * value for value in found]) for name, found in times.items()}
        row(size, milliseconds["plain"], milliseconds["Loop"], spread(ratios(times["Loop"], times["plain"])))
        if options.profile:
            print(f"{count} steps:")
            pstats.Stats(profile).sort_stats("cumulative").print_stats("lockstep", 40)


if __name__ == "__main__":
    main()
