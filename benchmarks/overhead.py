"""Time per step of Lockstep compared with a hand-written plain loop that does the same work.

    python benchmarks/overhead.py [--data map tensors collate] [--ranks 1 2] [--sizes small large] [--rounds 15]

The data are, by --data: `map`, an ordinary data set with `len` and `[index]`, as most are; `tensors`, a TensorDataset,
which Lockstep reads a micro-batch at a time; `collate`, a TensorDataset under a task with its own `collate`.

Both train the same MLP on the same batches with AdamW, log the mean loss to TensorBoard, a text file and a progress bar
every 50 steps, and use DDP from two ranks on. In one process (per rank), rounds of both alternate; the result is the
median over rounds of the difference and the ratio of their time per step. Set-up is not measured for either. Lockstep
runs with its default logging: console, train.log, metrics.jsonl, TensorBoard.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from harness import made_steps, spread, take_turns

BATCH = 32
# Hidden width, layers, steps in a round: about 2 ms and 30 ms per step on one core.
SIZES = {"small": (128, 1, 500), "large": (1024, 3, 60)}
MEMORY = (4096, 4, 6)  # 50 million parameters: 0.8 GiB with gradients and AdamW's moments


def data(hidden, layers, steps, kind="map"):
    from torch.utils.data import Dataset

    from lockstep_recipes.tasks.toy.options import ToyOptions
    from lockstep_recipes.tasks.toy.task import Toy

    class MapStyle(Dataset):
        def __init__(self, tensors):
            self.tensors = tensors

        def __len__(self):
            return len(self.tensors[0])

        def __getitem__(self, index):
            return self.tensors[0][index], self.tensors[1][index]

    class Mapped(Toy):
        def train_data(self):
            return MapStyle(super().train_data().tensors)

    class Collating(Toy):
        def collate(self, samples):
            return super().collate(samples)

    options = ToyOptions(samples=steps * BATCH, eval_samples=8, hidden=hidden, layers=layers)
    return {"map": Mapped, "tensors": Toy, "collate": Collating}[kind](options)


class Plain:
    """What a careful person writes: DistributedSampler, DDP, tqdm, SummaryWriter."""

    def __init__(self, task, world, rank):
        import torch
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler

        torch.manual_seed(0)
        self.model = task.model()
        if world > 1:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.sampler = DistributedSampler(task.train_data(), world, rank, seed=0)
        self.loader = DataLoader(task.train_data(), BATCH // world, sampler=self.sampler)
        self.task, self.rank, self.world, self.epoch = task, rank, world, 0

    def run(self, folder):
        """One epoch; returns seconds per step."""
        import torch
        import torch.distributed as dist
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        writer = SummaryWriter(folder / "plain") if self.rank == 0 else None
        log = open(folder / "plain.log", "a", buffering=1) if self.rank == 0 else None
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        bar = tqdm(total=len(self.loader), disable=self.rank > 0, file=open(os.devnull, "w"))
        running, step = torch.zeros(()), 0
        begun = time.perf_counter()
        for inputs, targets in self.loader:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.task.loss(self.model, (inputs, targets)) / len(inputs)
            loss.backward()
            self.optimizer.step()
            running += loss.detach()
            step += 1
            bar.update()
            if step % 50 == 0:
                mean = running / 50
                if self.world > 1:
                    dist.all_reduce(mean)
                    mean /= self.world
                if writer is not None:
                    writer.add_scalar("loss", float(mean), step)
                    log.write(f"step {step} loss {float(mean):.4f}\n")
                running.zero_()
        seconds = time.perf_counter() - begun
        bar.close()
        if writer is not None:
            writer.close()
            log.close()
        return seconds / step


class Ours:
    """The same through Lockstep's objects and loop; a round is one epoch."""

    def __init__(self, task, world, folder):
        from lockstep.trainer.trainer import Trainer

        config = {
            "batch": {"global": BATCH},
            "train": {"epochs": 1},
            "optim": {"name": "AdamW", "lr": 1e-3},
            "device": "cpu",
            "task": {"kind": "toy"},
        }
        self.task, self.world, self.folder = task, world, folder
        self.trainer = Trainer(config, run_dir=folder / "ours")

    def run(self, _):
        from lockstep.core import loop
        from lockstep.trainer import assemble, joining

        self.trainer.config = self.trainer.config.model_copy(update={"batch": self.trainer.config.batch.resolve(1)})
        self.trainer.run_dir.mkdir(exist_ok=True)
        prepared = assemble.prepare(self.trainer.setup, self.task, self.world)
        prepared.intervals = loop.Intervals(log=50)
        joining.open_writers(prepared, None, quiet=False)
        begun = time.perf_counter()
        made_steps(prepared, prepared.batches, stop=prepared.stop)
        seconds = time.perf_counter() - begun
        for writer in prepared.writers:
            writer.close()
        return seconds / prepared.stop


def rank_main(size, rounds, kind):
    import torch

    torch.set_num_threads(1)
    from lockstep.core.parallel.world import join_world

    with join_world("cpu") as world, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = data(*SIZES[size], kind)
        plain, ours = Plain(task, world.size, world.rank), Ours(task, world, folder)
        sys.stdout.flush()
        keep, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # the loops' output takes time, but is not shown
        ways = {name: partial(loop.run, folder) for name, loop in (("ours", ours), ("plain", plain))}
        times = take_turns(ways, rounds, warm_up=1)
        pairs = [(1e3 * p, 1e3 * o) for p, o in zip(times["plain"], times["ours"], strict=True)]
        os.dup2(keep, 1)
        if world.rank == 0:
            plain_ms = statistics.median(p for p, _ in pairs)
            extra = statistics.median(o - p for p, o in pairs)
            ratio = spread([o / p for p, o in pairs], ".3f")
            print(
                f"{kind:8} {world.size} ranks  {size:5}  plain {plain_ms:7.3f} ms  ours {extra:+.3f} ms  ratio {ratio}",
                flush=True,
            )


def memory_main(which):
    """Peak memory of a process that trains a few steps in only one of the ways."""
    import torch

    torch.set_num_threads(1)
    from lockstep.core.parallel.world import join_world

    with join_world("cpu") as world, tempfile.TemporaryDirectory() as name:
        task = data(*MEMORY)
        loop = Plain(task, 1, 0) if which == "plain" else Ours(task, world, Path(name))
        loop.run(Path(name))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", nargs="+", default=["map", "tensors"], choices=["map", "tensors", "collate"])
    parser.add_argument("--memory", choices=["plain", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        return memory_main(options.memory)
    if options.as_rank:
        return rank_main(options.as_rank, options.rounds, options.data[0])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for kind in options.data:
        for ranks in options.ranks:
            for size in options.sizes:
                command = [sys.executable, __file__, "--as-rank", size, "--rounds", str(options.rounds), "--data", kind]
                if ranks > 1:
                    command = [
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        "--nproc-per-node",
                        str(ranks),
                        *command[1:],
                    ]
                subprocess.run(command, check=True, env=environment)

    def peak(which):
        return float(
            subprocess.check_output([sys.executable, __file__, "--memory", which], env=environment).split()[-1]
        )

    peaks = take_turns({which: partial(peak, which) for which in ("plain", "ours")}, 3)
    plain, ours = map(statistics.median, peaks.values())
    print(
        f"peak memory, 1 rank, 50 million parameters: plain {plain:.0f} MiB, ours {ours:.0f} MiB, "
        f"ratio {ours / plain:.3f}"
    )
    return None


if __name__ == "__main__":
    main()
