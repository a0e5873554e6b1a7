"""Seconds per step on one rank with one thread per core, while other processes keep the cores busy.

    python benchmarks/busy.py [--busy 0 2] [--rounds 3]

A small MLP in plain torch: with OpenMP's default waiting (`GOMP_SPINCOUNT=300000` is libgomp's default), with the
settings of `import lockstep`, and with one thread. The three alternate; the result is the median of their medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

WAYS = {
    "threads that spin": {"GOMP_SPINCOUNT": "300000"},
    "import lockstep": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
STEPS = """
import time
import lockstep, torch
from torch import nn
from torch.nn import functional
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
inputs, targets = torch.randn(512, 64), torch.randint(0, 10, (512,))
times, end = [], time.perf_counter() + 5
while len(times) < 10 or time.perf_counter() < end:
    begun = time.perf_counter()
    functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - begun)
print(sorted(times)[len(times) // 2])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, os.cpu_count() or 1])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    own = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    for busy in options.busy:
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        try:
            for _ in range(options.rounds):
                for way, variables in WAYS.items():
                    command = [sys.executable, "-c", STEPS]
                    done = subprocess.run(command, env=clean | variables, check=True, capture_output=True, text=True)
                    found[way].append(float(done.stdout))
        finally:
            for process in others:
                process.kill()
        medians = {way: 1000 * statistics.median(times) for way, times in found.items()}
        figures = ", ".join(f"{way} {median:.1f} ms" for way, median in medians.items())
        print(f"{busy} busy processes, load {os.getloadavg()[0]:.0f}: {figures}", flush=True)


if __name__ == "__main__":
    main()
