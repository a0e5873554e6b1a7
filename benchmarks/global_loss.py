"""A loss over the global batch: seconds and memory of a step against a plain loop that holds the whole batch.

    python benchmarks/global_loss.py [--steps 12] [--batch 512] [--width 512] [--rounds 3] [--micros 512 64 16]

Two towers of convolutions over pictures of 64 x 64 pixels, with the loss of CLIP, on one process. `plain` computes all
embeddings with their graph, and one backward pass. Lockstep has the given micro-batches: a pass without gradient, then
a pass with gradient. The ways alternate. Seconds are medians over steps; memory is the largest resident size of the
process above that before its first step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

from lockstep import Task, Trainer


def tower(width):
    return nn.Sequential(
        nn.Conv2d(3, width // 8, 5, 2, 2),
        nn.ReLU(),
        nn.Conv2d(width // 8, width // 4, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width // 4, width // 2, 3, 2, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width // 2, 128),
    )


class Pairs(Task):
    def __init__(self, length, width):
        self.length, self.width = length, width

    def model(self):
        return nn.ModuleDict({"left": tower(self.width), "right": tower(self.width)})

    def train_data(self):
        return TensorDataset(*torch.randn(2, self.length, 3, 64, 64).unbind())

    def embed(self, model, batch):
        return [normalize(model[side](part), dim=1) for side, part in zip(("left", "right"), batch, strict=True)]

    def loss(self, model, embedded):
        scores = 10 * embedded[0] @ embedded[1].T
        own = torch.arange(len(scores))
        return (cross_entropy(scores, own, reduction="sum") + cross_entropy(scores.T, own, reduction="sum")) / 2


def resident_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def plain(options):
    torch.manual_seed(0)
    task = Pairs(options.batch, options.width)
    model, batch = task.model(), task.train_data().tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before, seconds = resident_mb(), []
    for _ in range(options.steps):
        begun = time.perf_counter()
        optimizer.zero_grad()
        (task.loss(model, task.embed(model, batch)) / options.batch).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:]), resident_mb() - before


def lockstep(options, micro):
    config = {
        "batch": {"global": options.batch, "micro": micro},
        "train": {"steps": options.steps},
        "log": {"every_steps": 1, "writers": ["json_lines"], "pictures": 0, "flops": False},
        "device": "cpu",
    }
    seconds, begun = [], []

    class Watched(Pairs):
        def train_data(self):
            data = super().train_data()
            begun.append(resident_mb())
            return data

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, run_dir=folder + "/run", quiet=True)
        trainer.fit(Watched(options.batch, options.width))
        times = [entry["time_s"] for entry in trainer.history if "train/loss" in entry]
        seconds = [later - earlier for earlier, later in itertools.pairwise(times[1:])]
    return statistics.median(seconds), resident_mb() - begun[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micros", type=int, nargs="*", help="default: the batch, an eighth of it, a 32nd")
    parser.add_argument("--way", type=int, help=argparse.SUPPRESS)  # one measurement: 0 is plain, else the micro-batch
    options = parser.parse_args()
    if options.way is not None:
        torch.set_num_threads(1)
        print(json.dumps(lockstep(options, options.way) if options.way else plain(options)))
        return
    micros = options.micros or [options.batch, options.batch // 8, options.batch // 32]
    found = {way: [] for way in (0, *micros)}
    for _ in range(options.rounds):
        for way, results in found.items():
            own = [sys.executable, __file__, *sys.argv[1:], "--way", str(way)]
            done = subprocess.run(
                own, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            results.append(json.loads(done.stdout.splitlines()[-1]))
    print("| way | seconds of a step | ratio | memory (MB) |\n|---|---|---|---|")
    for way, results in found.items():
        seconds = statistics.median(result[0] for result in results)
        ratio = statistics.median(mine[0] / plain[0] for mine, plain in zip(results, found[0], strict=True))
        name = f"Lockstep, micro-batches of {way}" if way else "plain loop, the whole batch"
        print(f"| {name} | {seconds:.2f} | {ratio:.2f} | {statistics.median(result[1] for result in results):.0f} |")


if __name__ == "__main__":
    main()
