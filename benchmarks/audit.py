"""What the audit's observers cost: steps of a script with and without them, alternating.

    python benchmarks/audit.py [--rounds 5] [--steps 160] [--every 50 1]

Two ranks train a small convolutional network with DDP, on one thread each. A round runs the script plainly and with
each sampling, in a new order. Printed are medians over rounds and ratios within rounds: of the main thread's computing
time, which other processes disturb less and which holds all that observers do, and of the time by the clock.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SKIPPED = 10  # of the first steps, which start up


def train(steps: int, width: int) -> None:
    """The script: prints the seconds of each step on rank 0."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    torch.manual_seed(0)

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(3, width), *block(width, 2 * width), *block(2 * width, 4 * width)]
    deep = [layer for _ in range(3) for layer in (nn.Conv2d(4 * width, 4 * width, 3, 1, 1), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, *deep, nn.Flatten(), nn.Linear(64 * width, 10)))
    data = TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters())
    seconds: list[tuple[float, float]] = []
    while len(seconds) < steps:
        began = time.thread_time(), time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            ended = time.thread_time(), time.perf_counter()
            seconds.append((ended[0] - began[0], ended[1] - began[1]))
            began = ended
            if len(seconds) == steps:
                break
    if dist.get_rank() == 0:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(json.dumps({"seconds": seconds[SKIPPED:], "parameters": parameters}))
    dist.destroy_process_group()


def measure(options: argparse.Namespace, every: int | None) -> tuple[float, float, float, int]:
    """Of a step: (median, mean) seconds of computing of the main thread, median seconds; the number of parameters."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        observed = ["-m", "lockstep.audit", "--folder", folder, "--every", str(every)] if every else []
        command = [sys.executable, *observed, __file__, "--train", "--steps", str(options.steps)]
        command += ["--width", str(options.width)]
        ranks = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ
                | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            )
            for rank in range(2)
        ]
        texts = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            sys.exit(f"the script failed, with {observed}")
        if every and len(list(Path(folder).glob("rank-*.jsonl"))) != 2:
            sys.exit("no events were written")
    told = json.loads(next(line for line in texts[0].splitlines() if line.startswith("{")))  # a report may follow
    computing, seconds = zip(*told["seconds"], strict=True)
    return statistics.median(computing), statistics.fmean(computing), statistics.median(seconds), told["parameters"]


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--every", type=int, nargs="+", default=[50, 1])
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.steps, options.width)
        return
    ways: list[int | None] = [None, *options.every]
    found: dict[int | None, list[tuple[float, float, float, int]]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            found[way].append(measure(options, way))
            print(way, found[way][-1], file=sys.stderr, flush=True)
    print(f"{found[None][0][3]:,} parameters, 2 ranks, {options.rounds} rounds of {options.steps} steps")
    for way in ways:
        for column, name in enumerate(("median of computing", "mean of computing", "median")):
            times = [row[column] for row in found[way]]
            ratios = [row[column] / plain[column] for row, plain in zip(found[way], found[None], strict=True)]
            ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            print(
                f"{f'every {way}' if way else 'plain':10} {name:19} {1e3 * statistics.median(times):6.2f} ms, {ratio}"
            )


if __name__ == "__main__":
    main()
