"""The cost of a checkpoint: Lockstep's asynchronous save compared with `torch.save` on rank 0, two ranks, DDP.

    python benchmarks/saving.py [--rounds 7] [--parameters 100] [--folder DIR]

100 million parameters with AdamW's moments are 1.2 GB. One training with one model; its phases alternate: steps without
a save, steps after a save of either kind, and again. The order of the two kinds changes from round to round.

blocked  seconds until the slower rank may continue. For `torch.save`: with the barrier at which the other rank waits.
total    blocked, plus how much longer the following steps took than as many without a save. There are enough of
         them to cover the background write, which ends with fsync and deletes the previous checkpoint.

`torch.save` is used as usual: no fsync, no checksum; its file is deleted outside the measured time, before the system
has written it to disk. Both favour `torch.save`. The first round is reported separately: cold buffers and imports. So
are rounds in which other processes took more than `--busy` of the machine: the medians cover the rest, if there is any.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from harness import ratios, spread

LAYERS = 24
BATCH = 16  # per rank
MIN_STEPS = 4


class Loop:
    """A training and the two ways to save its state; one object per rank."""

    def __init__(self, world, parameters, folder):
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        from lockstep.core.checkpoint.retention import CheckpointConfig
        from lockstep.core.checkpoint.saver import Saver

        class Residual(nn.Linear):
            def forward(self, inputs):
                return inputs + super().forward(inputs).relu()

        width = round(math.sqrt(parameters / LAYERS))
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Residual(width, width) for _ in range(LAYERS)))
        self.forward = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.inputs = torch.randn(BATCH, width)
        self.world, self.folder, self.step = world, folder, 0
        self.saver = Saver(folder / "ours", world, CheckpointConfig(keep_last=1), tell=print)
        self.written_at, self.watched = 0.0, threading.Event()
        self.watched.set()

    def steps(self, count):
        """Seconds of `count` steps."""
        begun = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad(set_to_none=True)
            self.forward(self.inputs).square().mean().backward()
            self.optimizer.step()
            self.step += 1
        return time.perf_counter() - begun

    def nothing(self):
        pass

    def plain(self):
        import torch
        import torch.distributed as dist

        if self.world.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
            torch.save(state, self.folder / "plain.pt")
        dist.barrier()

    def ours(self):
        """Like `lockstep.trainer.trainer.Trainer`."""
        from lockstep.core.checkpoint.state import capture

        tensors, values = capture(self.model, self.optimizer)
        about = {
            "step": self.step,
            "skipped": 0,
            "loss_scale": None,
            "metrics": {},
            "data": {},
            "config": "",
            "versions": {},
        }
        self.saver.save(self.step, tensors, values, about)
        self.watched.clear()
        threading.Thread(target=self.watch, args=(self.saver.thread,)).start()

    def watch(self, writing):
        writing.join()
        self.written_at = time.perf_counter()
        self.watched.set()

    def phase(self, save, count):
        """Of the slower rank: blocked seconds, seconds of `count` steps after it, seconds until the background write is
        done. And the fraction of the machine that other processes took meanwhile."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        machine, own, begun = user_s(), os.times().user, time.perf_counter()
        save()
        blocked = time.perf_counter() - begun
        following = self.steps(count)
        wall = time.perf_counter() - begun
        used = torch.tensor([os.times().user - own], dtype=torch.float64)
        dist.all_reduce(used)
        others = (user_s() - machine - used.item()) / wall / (os.cpu_count() or 1)
        self.saver.wait()
        self.watched.wait()
        times = torch.tensor([blocked, following, max(0.0, self.written_at - begun), others], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        if self.world.rank == 0:
            (self.folder / "plain.pt").unlink(missing_ok=True)
        return times.tolist()


def user_s():
    """Seconds that all processes of the machine have computed, without the kernel's (which writes files)."""
    with open("/proc/stat") as file:
        return sum(map(int, file.readline().split()[1:3])) / os.sysconf("SC_CLK_TCK")


def rank_main(rounds, parameters, busy, folder):
    import torch

    torch.set_num_threads(1)
    from lockstep.core.parallel.world import join_world
    from lockstep.launch.watchdog import Watchdog

    with join_world("cpu", watch=partial(Watchdog, timeout_s=600, folder=folder)) as world:
        loop = Loop(world, parameters, folder)
        loop.steps(2)
        count, found = MIN_STEPS, []
        for number in range(rounds + 1):
            kinds = [loop.plain, loop.ours] if number % 2 else [loop.ours, loop.plain]
            base, times = [], {}
            for kind in kinds:
                base.append(loop.phase(loop.nothing, count))
                times[kind.__name__] = loop.phase(kind, count)
            ours = times["ours"]
            step = statistics.mean(one[1] / count for one in base)
            row = {
                "others": statistics.mean(one[3] for one in [*base, *times.values()]),
                "step": step,
                "written": ours[2],
                "window": ours[0] + ours[1],
            }
            row |= {f"{name} blocked": t[0] for name, t in times.items()} | {
                f"{name} total": t[0] + t[1] - count * step for name, t in times.items()
            }
            if world.rank == 0:
                label = "first round" if number == 0 else f"round {number}"
                print(
                    f"{label} ({count} steps): " + ", ".join(f"{name} {value:.2f}" for name, value in row.items()),
                    flush=True,
                )
            if number == 0:  # the steps that cover the write; the same on all ranks, like the times
                count = max(MIN_STEPS, math.ceil(1.3 * ours[2] / step))
            else:
                found.append(row)
        loop.saver.finish()
        if world.rank == 0:
            size = sum(parameter.numel() for parameter in loop.model.parameters()) * 12 / 1e9
            report(found, size, busy)


def report(found, size, busy):
    quiet = [row for row in found if row["others"] <= busy]
    print(f"{len(quiet)} of {len(found)} rounds with at most {busy:.0%} of the machine taken by others")
    found = quiet or found
    middle = {name: statistics.median(row[name] for row in found) for name in found[0]}
    print(
        f"{size:.2f} GB, 2 ranks, step {middle['step']:.2f} s; "
        f"written and committed after {middle['written']:.2f} s of {middle['window']:.2f} s"
    )
    for what in ("blocked", "total"):
        of_rounds = ratios(*([row[f"{who} {what}"] for row in found] for who in ("ours", "plain")))
        times = f"torch.save {middle[f'plain {what}']:.2f} s, Lockstep {middle[f'ours {what}']:.2f} s"
        print(f"{what:7}  {times}, ratio {spread(of_rounds)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parameters", type=float, default=100, help="in millions")
    parser.add_argument(
        "--busy", type=float, default=0.05, help="fraction of the machine that others may take in a round that counts"
    )
    parser.add_argument("--folder", type=Path, help="write checkpoints to this folder; default: a temporary folder")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        return rank_main(options.rounds, options.parameters * 1e6, options.busy, options.folder)
    folder = Path(tempfile.mkdtemp(prefix="saving-", dir=options.folder))
    values = {"rounds": options.rounds, "parameters": options.parameters, "busy": options.busy, "folder": folder}
    arguments = [__file__, "--as-rank", *(part for key, value in values.items() for part in (f"--{key}", str(value)))]
    try:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


if __name__ == "__main__":
    main()
