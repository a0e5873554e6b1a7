"""Milliseconds of a step on one rank with one thread per core, while other processes keep the cores busy.

    python benchmarks/busy.py [--busy 0 2] [--rounds 5]

A small MLP and the networks of the recipes `digits` and `image_folder`, in plain torch: with OpenMP's default waiting
(`GOMP_SPINCOUNT=300000` is libgomp's default), with the settings of `import lockstep`, and with one thread. The three
alternate; a figure is the median over the rounds of medians, with the median of ratios to threads that spin.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial

from harness import ratios, spread, take_turns

WAYS = {
    "threads that spin": {"GOMP_SPINCOUNT": "300000"},
    "import lockstep": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
STEPS = """
import sys, time
import lockstep, torch
from torch import nn
from torch.nn import functional
from lockstep_recipes.tasks.vision.classification.convnet import ConvNet
from lockstep_recipes.tasks.vision.classification.resnet9 import ConvNet4
torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
for model, shape in ((mlp, (512, 64)), (ConvNet(1, 10, 8), (64, 1, 8, 8)), (ConvNet4(3, 10), (64, 3, 32, 32))):
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = torch.randn(shape), torch.randint(0, 10, shape[:1])
    times, end = [], time.perf_counter() + 3
    while len(times) < 4 or time.perf_counter() < end:
        begun = time.perf_counter()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begun)
    print(sorted(times)[len(times) // 2])
"""
NETWORKS = ("MLP", "digits", "image_folder")


def steps(variables: dict[str, str]) -> list[float]:
    """The milliseconds of a step of each network."""
    own = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, env=clean | variables, check=True, capture_output=True, text=True)
    return [1000 * float(line) for line in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, os.cpu_count() or 1])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for busy in options.busy:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        try:
            found = take_turns({way: partial(steps, variables) for way, variables in WAYS.items()}, options.rounds)
        finally:
            for process in others:
                process.kill()
        print(f"{busy} busy processes, load {os.getloadavg()[0]:.0f}", flush=True)
        for place, network in enumerate(NETWORKS):
            spinning = [times[place] for times in found["threads that spin"]]
            for way, rounds in found.items():
                ours = [times[place] for times in rounds]
                print(f"  {network}, {way}: {spread(ours, '.1f')} ms, ratio {spread(ratios(ours, spinning), '.3f')}")


if __name__ == "__main__":
    main()
