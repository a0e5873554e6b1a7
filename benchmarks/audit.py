"""The cost of the audit's observers: steps of a script with and without them, in blocks of one process.

    python benchmarks/audit.py [--rounds 3] [--steps 1000] [--width 32] [--every 50 1]

Two ranks train a small convolutional network with DDP, on one thread each, under the audit. Every 10 steps the
observers are removed from torch or installed again, so both variants run on the same machine state. The output is, over
the rounds, the median and the range of two ratios: of the main thread's computing time, which other processes disturb
less and which includes all work of the observers, and of wall-clock time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import free_port, ratios, spread

BLOCK = 10
SKIPPED = 40  # of the first steps, which start up


def switch() -> Callable[[bool], None]:
    """A function that removes all observers from torch, or installs them again."""
    from lockstep_audit.observe import torch_private
    from lockstep_audit.observe.recorder import recorder

    places = []
    for patch in torch_private._patches():
        for name in (patch.module, *patch.aliases):
            owner = sys.modules.get(name)
            *outer, last = patch.name.split(".")
            for part in outer if owner is not None else ():
                owner = getattr(owner, part)
            function = getattr(owner, last, None)
            if hasattr(function, "__wrapped__"):
                places.append((owner, last, function))
    folder = recorder.folder

    def put(is_on: bool) -> None:
        for owner, name, function in places:
            setattr(owner, name, function if is_on else function.__wrapped__)
        recorder.folder = folder if is_on else None

    return put


def train(steps: int, width: int) -> None:
    """The script: prints the seconds of each step on rank 0, and whether it was observed."""
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
    put, told, epoch = switch(), list[tuple[bool, float, float]](), 0
    while len(told) < steps:
        sampler.set_epoch(epoch := epoch + 1)
        began = time.thread_time(), time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            ended = time.thread_time(), time.perf_counter()
            is_on = len(told) // BLOCK % 2 == 0
            told.append((is_on, ended[0] - began[0], ended[1] - began[1]))
            if len(told) % BLOCK == 0:
                put(not is_on)
            began = time.thread_time(), time.perf_counter()
            if len(told) == steps:
                break
    put(True)
    if dist.get_rank() == 0:
        kept = [step for number, step in enumerate(told) if number >= SKIPPED and number % BLOCK]
        print(json.dumps({"steps": kept, "parameters": sum(parameter.numel() for parameter in model.parameters())}))
    dist.destroy_process_group()


def measure(options: argparse.Namespace, every: int) -> tuple[dict[str, tuple[float, float]], int]:
    """By name: seconds of a step without observers and with them; the number of parameters."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep_audit", "--folder", folder, "--every", str(every), __file__]
        command += ["--train", "--steps", str(options.steps), "--width", str(options.width)]
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
        lines = [line for line in texts[0].splitlines() if line.startswith('{"steps"')]  # a report may follow
        events = [path.read_text() for path in Path(folder).glob("rank-*.jsonl")]
    if any(rank.returncode for rank in ranks) or not lines:
        sys.exit(f"the script failed: {texts[0][-2000:]}")
    if len(events) != 2 or any(text.count('"kind":"step"') < options.steps // 2 - BLOCK for text in events):
        sys.exit("events are missing: the observers did not see each of their steps")
    told = json.loads(lines[0])
    found = {}
    for name, of, column in (
        ("median of computing", statistics.median, 1),
        ("mean of computing", statistics.fmean, 1),
        ("median of wall-clock time", statistics.median, 2),
    ):
        plain, observed = ([step[column] for step in told["steps"] if step[0] is is_on] for is_on in (False, True))
        found[name] = of(plain), of(observed)
    print(every, found, file=sys.stderr, flush=True)
    return found, told["parameters"]


def main() -> None:
    """Measure, and print a line for each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--every", type=int, nargs="+", default=[50, 1])
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.steps, options.width)
        return
    for every in options.every:
        rounds = [measure(options, every) for _ in range(options.rounds)]
        print(f"every {every}: {rounds[0][1]:,} parameters, 2 ranks, {options.rounds} rounds of {options.steps} steps")
        for name in rounds[0][0]:
            plain, observed = zip(*(found[name] for found, _ in rounds), strict=True)
            ratio = spread(ratios(observed, plain), ".3f")
            shown = f"{1e3 * statistics.median(plain):6.2f} ms, observed {1e3 * statistics.median(observed):6.2f} ms"
            print(f"  {name}: {shown}, {ratio}", flush=True)


if __name__ == "__main__":
    main()
