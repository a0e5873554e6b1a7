"""Time per step of Lockstep compared with a hand-written plain loop that does the same work.

    python benchmarks/overhead.py [--data map tensors collate] [--ranks 1 2] [--sizes small large] [--rounds 15]
    python benchmarks/overhead.py --causes [--data map] [--ranks 1] [--sizes small] [--rounds 15]

The data are, by --data: `map`, an ordinary data set with `len` and `[index]`, as most are; `tensors`, a TensorDataset,
which Lockstep reads a micro-batch at a time; `collate`, a TensorDataset under a task with its own `collate`.

Both train the same MLP on the same batches of 64 with AdamW, log the mean loss to TensorBoard, a text file and a
progress bar every 50 steps, and use DDP from two ranks on. In one process (per rank), rounds alternate; the result is
the median over rounds of the times and of the ratio of a step, by the clock and in processor time. Set-up
is not measured for either. Lockstep runs with its default logging: console, train.log, metrics.jsonl, TensorBoard.
`--causes` prints a table with the processor time of a step by cause instead, the median over rounds.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from harness import header, made_steps, row, spread, take_turns

BATCH = 64
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


def clocks():
    """By the clock, and of the processor, in seconds."""
    return collections.Counter(clock=time.perf_counter(), processor=time.process_time())


def by_step(seconds, steps):
    return {name: value / steps for name, value in seconds.items()}


class Causes:
    """Processor time by cause. A cause within another counts only for itself."""

    def __init__(self, task):
        import torch
        from torch.optim.lr_scheduler import LRScheduler  # noqa: F401 - with it, torch wraps the steps of optimizers
        from torch.utils.data import _utils, dataloader
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        from lockstep.core import joined_parts, log_window, step, training_log
        from lockstep.core import task as tasks
        from lockstep.core.data import loader, order, randomness
        from lockstep.core.parallel import single, stop_consensus, strategy

        self.running, self.spent, self.since = ["loop and step"], collections.Counter(), time.process_time()
        self.watch("arithmetic", type(task), "loss")
        self.watch("arithmetic", torch.autograd, "backward")
        self.watch("optimizer", torch.optim.AdamW, "step", "zero_grad")
        self.watch("collating", _utils.collate, "default_collate")
        self.watch("collating", tasks, "default_collate")
        self.watch("order", order.StepPlan, "rank_micro_batches")
        self.watch("order", dataloader._BaseDataLoaderIter, "_next_index")
        self.watch("reading and seeding samples", loader.MicroBatches, "_read")
        self.watch("reading and seeding samples", _utils.fetch._MapDatasetFetcher, "fetch")
        self.watch("seeding", randomness.SampleSeeding, "begin", "found_more")
        self.watch("seeding", step, "seed_forward")
        self.watch("handover", loader.MicroBatches, "__getitem__")
        self.watch("handover", dataloader._BaseDataLoaderIter, "__next__")
        self.watch("guards of the loss and the backward pass", strategy.Forward, "forward")
        self.watch("guards of the loss and the backward pass", single.Single, "backward", "begin_step")
        self.watch("units and factors", step, "_factors", "_count_units")
        self.watch("gradient norm, clipping", step, "grad_norm", "clip_grads")
        self.watch("Parts", joined_parts.JoinedParts, "before_step", "call", "agree")
        self.watch("log", log_window.LogWindow, "add", "entry")
        self.watch("log", training_log.TrainingLog, "window_entry", "progress")
        self.watch("log", SummaryWriter, "add_scalar")
        self.watch("log", tqdm, "update")
        self.watch("heartbeat, stopping", stop_consensus.StopConsensus, "__call__")

    def clocks(self):
        """The seconds so far, by cause."""
        self.turn()
        return self.spent.copy()

    def turn(self):
        now = time.process_time()
        self.spent[self.running[-1]] += now - self.since
        self.since = now

    def watch(self, cause, owner, *names):
        """From now on, the time of these functions of an object or a class counts for `cause`."""
        for name in names:
            setattr(owner, name, self._timed(cause, getattr(owner, name)))

    def _timed(self, cause, function):
        @functools.wraps(function)
        def timed(*args, **kwargs):
            self.turn()
            self.running.append(cause)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self.running.pop()

        return timed


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

    def run(self, folder, clocks):
        """One epoch; returns what passed on the clocks per step."""
        import torch
        import torch.distributed as dist
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        writer = SummaryWriter(folder / "plain") if self.rank == 0 else None
        log = open(folder / "plain.log", "a", buffering=1) if self.rank == 0 else None
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        bar = tqdm(total=len(self.loader), disable=self.rank > 0, file=open(os.devnull, "w"))
        running, step, begun = torch.zeros(()), 0, clocks()
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
        passed = clocks() - begun
        bar.close()
        if writer is not None:
            writer.close()
            log.close()
        return by_step(passed, step)


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

    def run(self, _, clocks):
        from lockstep.core import loop
        from lockstep.trainer import assemble, joining

        self.trainer.config = self.trainer.config.model_copy(update={"batch": self.trainer.config.batch.resolve(1)})
        self.trainer.run_dir.mkdir(exist_ok=True)
        prepared = assemble.prepare(self.trainer.setup, self.task, self.world)
        prepared.intervals = loop.Intervals(log=50)
        joining.open_writers(prepared, None, quiet=False)
        begun = clocks()
        made_steps(prepared, prepared.batches, stop=prepared.stop)
        passed = clocks() - begun
        for writer in prepared.writers:
            writer.close()
        return by_step(passed, prepared.stop)


def rank_main(size, rounds, kind, causes):
    import torch

    torch.set_num_threads(1)
    from lockstep.core.parallel.world import join_world

    with join_world("cpu") as world, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = data(*SIZES[size], kind)
        read = Causes(task).clocks if causes else clocks
        loops = {"ours": Ours(task, world, folder), "plain": Plain(task, world.size, world.rank)}
        sys.stdout.flush()
        keep, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # the loops' output takes time, but is not shown
        ways = {name: partial(loop.run, folder, read) for name, loop in loops.items()}
        times = take_turns(ways, rounds, warm_up=1)
        os.dup2(keep, 1)
        if world.rank == 0:
            (show_causes if causes else show)(f"{kind}, {size}, {world.size} ranks", times)


def show(name, times):
    """A row of the ratios."""
    ours, plain = times["ours"], times["plain"]
    clock, processor = (
        [one[which] / other[which] for one, other in zip(ours, plain, strict=True)] for which in ("clock", "processor")
    )
    shown = [spread([1e3 * one["clock"] for one in found], ".3f") for found in (plain, ours)]
    row(name, *shown, spread(clock), spread(processor))


def show_causes(name, times):
    """A row for each cause."""
    causes = {cause for found in times.values() for one in found for cause in one}
    medians = {
        way: {cause: 1e6 * statistics.median(one.get(cause, 0) for one in found) for cause in causes}
        for way, found in times.items()
    }
    plain, ours = medians["plain"], medians["ours"]
    header(f"microseconds of a step: {name}", "plain", "Lockstep")
    for cause in sorted(causes, key=lambda cause: -ours[cause]):
        row(cause, f"{plain[cause]:.0f}", f"{ours[cause]:.0f}")
    row("sum", f"{sum(plain.values()):.0f}", f"{sum(ours.values()):.0f}")


def memory_main(which):
    """Peak memory of a process that trains a few steps in only one of the ways."""
    import torch

    torch.set_num_threads(1)
    from lockstep.core.parallel.world import join_world

    with join_world("cpu") as world, tempfile.TemporaryDirectory() as name:
        task = data(*MEMORY)
        loop = Plain(task, 1, 0) if which == "plain" else Ours(task, world, Path(name))
        loop.run(Path(name), clocks)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", nargs="+", default=["map", "tensors"], choices=["map", "tensors", "collate"])
    parser.add_argument("--causes", action="store_true", help="print a table of the processor time by cause")
    parser.add_argument("--memory", choices=["plain", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        return memory_main(options.memory)
    if options.as_rank:
        return rank_main(options.as_rank, options.rounds, options.data[0], options.causes)
    if not options.causes:
        header("training", "plain (ms)", "Lockstep (ms)", "ratio", "ratio of processor time")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for kind in options.data:
        for ranks in options.ranks:
            for size in options.sizes:
                command = [sys.executable, __file__, "--as-rank", size, "--rounds", str(options.rounds), "--data", kind]
                command += ["--causes"] * options.causes
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

    if options.causes:
        return None

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
