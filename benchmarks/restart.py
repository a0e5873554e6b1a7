"""Seconds from SIGKILL of one of two ranks to the end of the first step after the restart; and whether restarts hang.

    python benchmarks/restart.py [--rounds 9] [--restarts 20]

Lockstep (`lockstep train --max-restarts`) compared with a hand-written DDP loop that resumes from its `torch.save`
checkpoint under torch's elastic agent. In each round both are started, and a rank is killed, the same in both, once it
has saved. The result is the median of ratios, over rounds in which other processes took at most `--busy` of the machine
(if there are any), and also that of the computed seconds, which others hardly affect. Then `--restarts` kills of a
random rank at random times, in one Lockstep run; 120 s without a first step count as a hang. The plain loop draws no
bar and imports no TensorBoard; Lockstep runs with its defaults.

The parts of a restart. Each part ends when the slower rank has done it:
agent    the other ranks are ended, and new processes are started
imports  Python, torch; Lockstep's connection to the store where ranks meet
group    the process group is made; Lockstep claims the run directory
data     training data; Lockstep searches for a checkpoint, and checks it
model    model, checkpoint, DDP and the first batch
step     the first step
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from harness import ratios, spread

THIS = str(Path(__file__).resolve())
BATCH = 64  # over all ranks
EVERY = 50  # steps from checkpoint to checkpoint
PARTS = {
    "agent": "started",
    "imports": "imported",
    "group": "joined",
    "data": "model",
    "model": "loss",
    "step": "loss 2",
}
LIMIT_S = 120.0


# ---- what is trained


def mark(name, at=None):
    """Append a line `time cpu-seconds rank pid name` to the file that the environment names."""
    with open(os.environ["MARKS"], "a") as file:
        file.write(
            f"{time.time() if at is None else at:.3f} {time.process_time():.3f} "
            f"{os.environ['RANK']} {os.getpid()} {name}\n"
        )


def started(thread=None):
    """When this process, or one of its threads, was started; the system counts hundredths of a second."""
    text = Path(f"/proc/self/task/{thread or os.getpid()}/stat").read_text()
    ticks = int(text.rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def digits():
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(1797, 1, 8, 8, generator=generator), torch.randint(10, (1797,), generator=generator)
    )


def network():
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 10)
    )


def plain_loop():
    """A hand-written DDP loop that resumes from its `torch.save` checkpoint."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    mark("started", started())
    mark("imported")
    dist.init_process_group("gloo")
    mark("joined")
    rank, world, path = dist.get_rank(), dist.get_world_size(), Path(os.environ["CHECKPOINT"])
    data = digits()
    mark("model")
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    forward = DistributedDataParallel(model)
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, BATCH // world, sampler=sampler)
    while True:
        sampler.set_epoch(step // len(loader))
        for images, labels in loader:
            mark("loss")
            loss = nn.functional.cross_entropy(forward(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0 and rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)


if __name__ != "__main__":  # `lockstep train` reads its task from this file
    from torch import nn

    from lockstep import Task

    class Marked(Task):
        """The same model, data and marks."""

        def __init__(self):
            mark("started", started())
            # Lockstep starts this thread right before it makes the process group: imports are done, the store exists.
            threads = [thread.native_id for thread in threading.enumerate() if thread.name == "lockstep-failures"]
            mark("imported", started(*threads))
            mark("joined")

        def train_data(self):
            return digits()

        def model(self):
            mark("model")
            return network()

        def loss(self, model, batch):
            mark("loss")
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


# ---- the measurement


class Hang(Exception):
    """A restart that did not reach its first step."""


@dataclass
class Restart:
    parts: dict[str, float]
    seconds: float
    cpu: float
    others: float


def busy_s():
    """Seconds that all processors of the machine have worked."""
    with open("/proc/stat") as file:
        return sum(map(int, file.readline().split()[1:4])) / os.sysconf("SC_CLK_TCK")


class Job:
    """A training of two ranks: `plain` or `lockstep`."""

    def __init__(self, which, folder, max_restarts):
        self.log, self.marks_file = folder / f"{which}.log", folder / f"{which}.marks"
        self.marks_file.touch()
        self.reading = self.marks_file.open()
        self.ranks, self.marks = {}, {}  # by pid: its rank; and its marks by name
        restarts = ("--max-restarts", str(max_restarts))
        if which == "plain":
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                *restarts,
                THIS,
                "--plain",
            ]
        else:
            command = [
                str(Path(sys.executable).parent / "lockstep"),
                "train",
                f"{THIS}:Marked",
                "--nproc",
                "2",
                *restarts,
            ]
            command += [
                "--run-dir",
                str(folder / "run"),
                f"batch.global={BATCH}",
                f"checkpoint.every_steps={EVERY}",
                "train.steps=100000000",
                "device=cpu",
            ]
        environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "MARKS": str(self.marks_file)}
        environment["CHECKPOINT"] = str(folder / "plain.pt")
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, env=os.environ | environment, stdout=out, stderr=subprocess.STDOUT)

    def wait(self, pids_before, steps):
        """Wait until two new processes have begun their `steps`-th step; return their pids by rank."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            for line in self.reading:
                at, cpu, rank, pid, name = line.split()
                self.ranks[int(pid)] = int(rank)
                self.marks.setdefault(int(pid), {}).setdefault(name, []).append((float(at), float(cpu)))
            new = {
                rank: pid
                for pid, rank in self.ranks.items()
                if pid not in pids_before and len(self.marks[pid].get("loss", [])) >= steps
            }
            if len(new) == 2:
                return new
            if time.monotonic() > deadline or self.process.poll() is not None:
                ended = "no step" if self.process.returncode is None else f"exit code {self.process.returncode}"
                raise Hang(
                    f"{ended} after {time.monotonic() - deadline + LIMIT_S:.0f} s; the end of its output:\n"
                    f"{self.log.read_text()[-3000:]}"
                )
            time.sleep(0.1)

    def kill(self, rank):
        """Kill a rank that has saved since it was started.

        Returns:
            the seconds of each part of the restart; the seconds that the new ranks computed, on average; and the
            fraction of the machine that everything else took (including the dying rank and the launcher).
        """
        pids = self.wait(self.killed_before, 2 * EVERY)
        time.sleep(random.uniform(0, 2))
        before = set(self.ranks)
        os.kill(pids[rank], signal.SIGKILL)
        since = begun = time.time()
        machine = busy_s()
        pids = self.wait(before, 2)
        machine, waited = busy_s() - machine, time.time() - begun
        parts = {}
        for part, name in PARTS.items():
            name, _, count = name.partition(" ")
            at = max(self.marks[pid][name][int(count or 1) - 1][0] for pid in pids.values())
            parts[part], since = at - since, at
        self.killed_before = before
        computed = sum(self.marks[pid]["loss"][1][1] for pid in pids.values())
        return Restart(parts, at - begun, computed / len(pids), (machine - computed) / waited / (os.cpu_count() or 1))

    killed_before = frozenset()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            for pid in (self.process.pid, *self.ranks):
                command = Path(f"/proc/{pid}/cmdline")
                if pid == self.process.pid or (command.exists() and b"restart.py" in command.read_bytes()):
                    os.kill(pid, signal.SIGKILL)
        self.reading.close()


def compare(rounds, busy):
    pairs = []
    for number in range(rounds):
        pair = {}
        for which in ("plain", "lockstep") if number % 2 else ("lockstep", "plain"):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Job(which, Path(folder), 3) as job:
                try:
                    pair[which] = job.kill(number % 2)
                except Hang as hang:
                    print(f"round {number + 1}, {which} did not come back: {hang}", flush=True)
        if len(pair) < 2:
            continue
        pairs.append(pair)
        told = "; ".join(
            f"{which} {one.seconds:.2f} s, others {one.others:.0%}" for which, one in sorted(pair.items(), reverse=True)
        )
        print(f"round {number + 1}, rank {number % 2} killed: {told}", flush=True)
    quiet = [pair for pair in pairs if max(one.others for one in pair.values()) <= busy]
    print(f"{len(quiet)} of {len(pairs)} rounds with at most {busy:.0%} of the machine taken by others")
    pairs = quiet or pairs
    if not pairs:
        return
    for which in ("plain", "lockstep"):
        rows = [pair[which] for pair in pairs]
        middle = ", ".join(f"{part} {statistics.median(row.parts[part] for row in rows):.2f}" for part in PARTS)
        seconds, cpu = (statistics.median(getattr(row, name) for row in rows) for name in ("seconds", "cpu"))
        print(f"{which:8} {seconds:.2f} s: {middle}; a rank computed {cpu:.2f} s")
    for name, what in (("seconds", "time"), ("cpu", "computing")):
        ours, plain = ([getattr(pair[which], name) for pair in pairs] for which in ("lockstep", "plain"))
        print(f"ratio of {what} {spread(ratios(ours, plain), '.3f')}", flush=True)


def in_a_row(restarts):
    times = []
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Job("lockstep", Path(folder), restarts) as job,
    ):
        try:
            for _ in range(restarts):
                times.append(job.kill(random.randrange(2)).seconds)
        except Hang as hang:
            print(hang)
    each = f", seconds each: {spread(times, '.1f')}" if times else ""
    print(f"{len(times)} of {restarts} restarts in a row came back{each}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument(
        "--busy", type=float, default=0.15, help="fraction of the machine that others may take in a round that counts"
    )
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        plain_loop()
        return
    if options.rounds:
        compare(options.rounds, options.busy)
    if options.restarts:
        in_a_row(options.restarts)


if __name__ == "__main__":
    main()
