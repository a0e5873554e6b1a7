"""FSDP on two ranks: the memory of a rank, the time of a step, and the memory for building the model.

    python benchmarks/sharding.py [memory] [steps] [build] [--parameters MILLIONS] [--rounds N] [--fused]

The model is a causal transformer in fp32, with AdamW and clipped gradients, and one torch thread per rank. "By hand"
means `fully_shard` on each block and on the model.

memory  Training through `Trainer.fit` with ddp and with fsdp, and by hand, each in new processes. Bytes are those of
        the storages of the rank's tensors just before an update. RSS is relative to the RSS just before the model was
        made, after the training of a small model. It is measured when the last update begins; its peak counts from the
        second step on. glibc keeps freed memory in pieces of up to 32 MB. With MALLOC_MMAP_THRESHOLD_=1048576 in the
        environment it returns the memory.
steps   Lockstep's loop with its default logging compared with the loop by hand on the same batches, with the loss
        logged every 50 steps. Phases of both alternate in one process per rank. Time is that of the slower rank, CPU
        time that of both ranks. The results are medians of ratios over rounds. Both start with the same weights; the
        difference of the final weights is a check.
build   Peak RSS while `run_model.build_model` makes the model, relative to one full copy of its parameters, in new
        processes that have trained a small model before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from harness import made_steps, spread
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Trainer
from lockstep.core import loop as engine
from lockstep.core import run_model
from lockstep.core.parallel.world import join_world
from lockstep.core.task import Task
from lockstep.launch.watchdog import Watchdog
from lockstep.trainer import assemble, joining

LAYERS, VOCABULARY, LENGTH, HEAD = 12, 8192, 32, 64
BATCH, LOG, PHASE = 4, 50, 10  # samples over both ranks; steps
DEFAULTS = {"memory": (60, 1), "steps": (20, 15), "build": (250, 3)}  # million parameters, rounds
SMALL = 0.1  # million parameters of the model that warms up
PEAK = Path("/proc/self/clear_refs")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs):
        q, k, v = (
            part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.qkv(self.before(inputs)).chunk(3, -1)
        )
        inputs = inputs + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return inputs + self.mlp(self.between(inputs))


class Transformer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        inputs = self.words(tokens) + self.places.weight
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(self.norm(inputs))


class Text(Task):
    """Random words. made: called just before a model is made."""

    def __init__(self, millions, steps=6, built=lambda: None):
        root = math.sqrt(
            VOCABULARY**2 + 12 * LAYERS * millions * 1e6
        )  # 12 width^2 in a layer, and the vocabulary twice
        self.width = max(1, round((root - VOCABULARY) / (12 * LAYERS) / HEAD)) * HEAD
        self.samples, self.made = steps * BATCH, built

    def model(self):
        self.built()
        return Transformer(self.width)

    def train_data(self):
        return TensorDataset(
            torch.randint(VOCABULARY, (self.samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        )

    def loss(self, model, batch):
        words = batch[0]
        return cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten(), reduction="sum") / LENGTH


class Plain:
    """By hand. samples: this rank's, step by step."""

    def __init__(self, task, samples, folder, fused):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.task, self.model = task, task.model()
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused or None)
        self.batches = iter(DataLoader(task.train_data(), batch_sampler=samples))
        self.log = (folder / f"plain-{dist.get_rank()}.log").open("w", buffering=1)
        self.running, self.step = torch.zeros(()), 0

    def steps(self, count=None):
        for batch in itertools.islice(self.batches, count):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.task.loss(self.model, batch) / len(batch[0])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.running += loss.detach()
            self.step += 1
            if self.step % LOG == 0:
                dist.all_reduce(self.running)
                self.log.write(f"step {self.step} loss {self.running.item() / LOG / 2:.4f}\n")
                self.running.zero_()


def trainer_of(strategy, folder, fused):
    optim = {"lr": 1e-4, "clip_norm": 1.0, "fused": fused}  # AdamW
    config = {
        "batch": {"global": BATCH},
        "train": {"epochs": 1},
        "optim": optim,
        "log": {"every_steps": LOG},
        "device": "cpu",
    }
    return Trainer(config | {"parallel": {"strategy": strategy}}, run_dir=folder, quiet=True)


def megabytes(key):
    """VmRSS, or VmHWM: the most since `PEAK` was written to."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(key))


def baseline():
    """RSS now. Freed memory is returned first: otherwise whoever reuses it would seem to take none."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    PEAK.write_text("5")
    return megabytes("VmRSS")


def held(tensors):
    """Megabytes of the storages of the local parts."""
    parts = [tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values()) / 2**20


def memory_rank(folder, options):
    found = {}

    def before_update(optimizer, *_):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        slots = [value for state in optimizer.state.values() for value in state.values()]
        found.update(
            parameters=held(parameters), gradients=held([one.grad for one in parameters]), optimizer=held(slots)
        )
        found["sum"] = found["parameters"] + found["gradients"] + found["optimizer"]
        found["RSS"] = megabytes("VmRSS") - found["began"]

    def after_update(*_):
        if "peak RSS" not in found:  # the first update created the optimizer's state
            PEAK.write_text("5")
        found["peak RSS"] = megabytes("VmHWM") - found["began"]

    register_optimizer_step_pre_hook(before_update)
    register_optimizer_step_post_hook(after_update)
    for millions in (SMALL, options.parameters):
        found.clear()
        task = Text(millions, built=lambda: found.update(began=baseline()))
        if options.strategy == "by hand":
            with join_world("cpu") as world:
                plain = Plain(
                    task,
                    [[first, first + 1] for first in range(2 * world.rank, task.samples, BATCH)],
                    folder,
                    options.fused,
                )
                plain.steps()
        else:
            trainer_of(options.strategy, folder / str(millions), options.fused).fit(task)
    return found


def steps_rank(folder, options):
    task = Text(options.parameters, steps=(options.rounds + 1) * PHASE)
    lockstep = trainer_of("fsdp", folder / "run", options.fused)
    times = {"plain": [], "Lockstep": []}
    with join_world("cpu", watch=partial(Watchdog, timeout_s=600, folder=folder)) as world:
        batch = lockstep.config.batch.resolve(world.data_size)
        lockstep.config = lockstep.config.model_copy(update={"batch": batch})
        prepared = assemble.prepare(lockstep.setup, task, world)
        order = [
            [index for chunk in prepared.plan.rank_micro_batches(step, world.rank) for index in chunk.indices]
            for step in range(prepared.stop)
        ]
        plain = Plain(task, order, folder, options.fused)

        def timed(name, phase):
            dist.barrier()
            begun, computed = time.perf_counter(), time.process_time()
            yield from phase()
            seconds = torch.tensor([time.perf_counter() - begun, time.process_time() - computed], dtype=torch.float64)
            dist.all_reduce(seconds[:1], dist.ReduceOp.MAX)
            dist.all_reduce(seconds[1:])
            times[name].append((seconds / PHASE).tolist())

        def alternating():
            """Lockstep's batches. Whenever a phase of its loop ends, the other loop has its turn."""
            phases = {
                "Lockstep": lambda: itertools.islice(prepared.batches, PHASE),
                "plain": lambda: plain.steps(PHASE) or (),
            }
            for number in range(options.rounds + 1):
                for name in sorted(phases, reverse=number % 2 == 0):
                    yield from timed(name, phases[name])

        lockstep.run_dir.mkdir(exist_ok=True)
        prepared.intervals = engine.Intervals(log=LOG)
        joining.open_writers(prepared, None, quiet=True)
        made_steps(prepared, alternating(), stop=prepared.stop)
        both = zip(prepared.model.parameters(), plain.model.parameters(), strict=True)
        apart = max(float((one.detach().to_local() - two.detach().to_local()).abs().max()) for one, two in both)
    return times | {"apart": apart}


def build_rank(folder, options):
    lockstep = trainer_of("fsdp", folder / "small", False)
    lockstep.fit(Text(SMALL))
    with join_world("cpu") as world:
        run_model.build_model(lockstep.config, Text(SMALL), world, steps_per_epoch=1)
        dist.barrier()
        began = baseline()
        built = run_model.build_model(lockstep.config, Text(options.parameters), world, steps_per_epoch=1)
        peak, copy = (
            megabytes("VmHWM") - began,
            sum(parameter.numel() for parameter in built.strategy.unwrapped.model.parameters()) * 4 / 2**20,
        )
        return {"copy": copy, "peak RSS": peak, "RSS after": megabytes("VmRSS") - began, "peak / copy": peak / copy}


def launch(what, options, strategy="fsdp"):  # two new processes; the result of each
    with tempfile.TemporaryDirectory(prefix="sharding-") as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            __file__,
            what,
            "--strategy",
            strategy,
        ]
        command += [
            "--as-rank",
            folder,
            "--parameters",
            str(options.parameters),
            "--rounds",
            str(options.rounds),
            *["--fused"] * options.fused,
        ]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        return [json.loads(Path(folder, f"found-{rank}.json").read_text()) for rank in range(2)]


def table(rounds, columns, label=""):
    """Medians over rounds, one line per rank; returns them."""
    middle = [{name: statistics.median(one[rank][name] for one in rounds) for name in columns} for rank in range(2)]
    print(f"{label:16}{''.join(f'{name:>12}' for name in columns)}")
    for rank, values in enumerate(middle):
        print(f"rank {rank}          {''.join(f'{value:12.3f}' for value in values.values())}", flush=True)
    return middle


def memory_main(options):
    columns = ["parameters", "gradients", "optimizer", "sum", "RSS", "peak RSS"]
    ways = ("ddp", "by hand", "fsdp")
    ddp, _, fsdp = (
        table([launch("memory", options, way) for _ in range(options.rounds)], columns, f"{way}, MB") for way in ways
    )
    ratios = [max(f[name] / d[name] for f, d in zip(fsdp, ddp, strict=True)) for name in columns]
    print(f"fsdp / ddp      {''.join(f'{ratio:12.3f}' for ratio in ratios)}", flush=True)


def steps_main(options):
    found = launch("steps", options)
    pairs = list(zip(found[0]["plain"], found[0]["Lockstep"], strict=True))[1:]
    for number, name in enumerate(("time", "CPU time")):
        ratios = [ours[number] / plain[number] for plain, ours in pairs]
        plain = statistics.median(plain[number] for plain, _ in pairs) * 1e3
        extra = statistics.median(ours[number] - plain[number] for plain, ours in pairs) * 1e3
        print(f"{name:8}  plain {plain:.1f} ms, Lockstep {extra:+.1f} ms, ratio {spread(ratios, '.3f')}")
    apart, steps = max(rank["apart"] for rank in found), (options.rounds + 1) * PHASE
    print(f"weights at most {apart:.1e} apart after {steps} steps of each", flush=True)


def build_main(options):
    table(
        [launch("build", options) for _ in range(options.rounds)],
        ["copy", "peak RSS", "RSS after", "peak / copy"],
        "MB",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"measurements, of {', '.join(DEFAULTS)}; default: all")
    parser.add_argument("--parameters", type=float, help="in millions")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--fused", action="store_true", help="use AdamW's fused kernel in both loops")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        torch.set_num_threads(1)
        found = globals()[f"{given.what[0]}_rank"](given.as_rank, given)
        (given.as_rank / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))
        return
    for what in given.what or DEFAULTS:
        options = argparse.Namespace(**vars(given))
        options.parameters, options.rounds = given.parameters or DEFAULTS[what][0], given.rounds or DEFAULTS[what][1]
        with torch.device("meta"):
            millions = sum(parameter.numel() for parameter in Text(options.parameters).model().parameters()) / 1e6
        print(f"\n{what}: {millions:.1f} million parameters, {LAYERS} blocks, {BATCH // 2} x {LENGTH} words per rank")
        globals()[f"{what}_main"](options)


if __name__ == "__main__":
    main()
