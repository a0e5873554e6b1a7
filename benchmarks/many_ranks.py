"""What grows with the number of ranks: tiny trainings with many processes on this machine, forked from a warm process.

    python benchmarks/many_ranks.py [--ranks 8 32 128] [--strategy ddp|fsdp] [--shard-ranks 8] [KEY=VALUE ...]
    python benchmarks/many_ranks.py --mesh 64 8

With `--mesh`: only what one of this many simulated ranks does to make the groups of FSDP's hybrid mesh.

For each number of ranks: a model of some hundred parameters, 5 steps, a checkpoint, a look at the processes, a SIGKILL
of a rank, a restart from the checkpoint, and a request to stop. All processes share the cores of this machine, so
wall-clock seconds grow with the ranks. The seconds that a rank itself computes should not.

first step  from the command until the last rank has made its first step
save        from when the last rank starts to save until the checkpoint is complete
restart     from SIGKILL of a rank until the last new rank has made a step
step        the median of steps 2 to 5 on rank 0
CPU s       computed by a rank until its first step, until its second step after the save, and until the first step of
            the restart: the mean of all ranks. "Python" and "gloo" divide the second among threads: those of Python,
            and those that send and receive for gloo and the store
PSS MiB     of a rank on average, with shared memory divided among its users; and of the launcher and the warm process
files, sockets  open files of a rank, the maximum and the mean; they include sockets
keys        in the store of the ranks, after the save
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import header, row
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Part, Task
from lockstep.core.parallel import rendezvous

THIS = Path(__file__).resolve()
SAVES_AFTER = 5  # steps
LIMIT_S = 900.0
COLUMNS = (
    ("ranks", "{:d}"),
    ("first step s", "{:.1f}"),
    ("step s", "{:.3f}"),
    ("save s", "{:.2f}"),
    ("restart s", "{:.1f}"),
    ("CPU s first step", "{:.2f}"),
    ("CPU s save", "{:.2f}"),
    ("CPU s Python", "{:.2f}"),
    ("CPU s gloo", "{:.2f}"),
    ("CPU s restart", "{:.2f}"),
    ("PSS MiB rank", "{:.1f}"),
    ("PSS MiB launcher", "{:.0f}"),
    ("files most", "{:d}"),
    ("files mean", "{:.0f}"),
    ("sockets mean", "{:.0f}"),
    ("threads", "{:.0f}"),
    ("keys", "{:.0f}"),
)


# ---- what ranks train


def mark(name, value=0.0):
    """Append a line to the file that the environment names; a line this short is written atomically."""
    words = (time.time(), time.process_time(), os.environ["RANK"], os.getpid(), name, value)
    with open(os.environ["MARKS"], "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


class Tiny(Task):
    def __init__(self, samples: int = 1024) -> None:
        self.samples = samples
        mark("imported")

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.samples, 8, generator=generator)
        return TensorDataset(inputs, inputs.tanh())

    def model(self):
        mark("model")
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]
        return nn.Sequential(*blocks, nn.Linear(8, 8))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean(dim=1).sum()


class Marks(Part):
    """Marks the first steps and the save, then slows steps down so that the processes can be examined."""

    def __init__(self) -> None:
        self.steps = 0

    def start(self, training):
        mark("ready")

    def after_step(self, training):
        self.steps += 1
        if self.steps <= SAVES_AFTER:
            mark(f"step-{self.steps}")
        elif self.steps == SAVES_AFTER + 2:
            if training.rank == 0:
                mark("keys", next(iter(rendezvous._stores.values()))[0].num_keys())
            mark("resting")
        else:
            time.sleep(0.5)

    def before_save(self, training):
        if self.steps == SAVES_AFTER:
            mark("saves")


# ---- the measurement


class Job:
    """A training of many ranks."""

    def __init__(self, options, ranks, folder):
        self.ranks, self.folder, self.log, self.found = ranks, folder, folder / "log", {}
        marks = folder / "marks"
        marks.touch()
        self.marks = marks.open()
        command = [str(Path(sys.executable).parent / "lockstep"), "train", f"{THIS}:Tiny"]
        command += ["--nproc", str(ranks), "--max-restarts", "1", "--run-dir", str(folder / "run")]
        command += ["device=cpu", "train.steps=100000", f"batch.global={ranks}"]
        command += [f"parallel.strategy={options.strategy}"]
        command += [f"checkpoint.every_steps={SAVES_AFTER}", f"task.samples={16 * ranks}"]
        command += [f"train.parts=[{THIS}:Marks]", *options.keys]
        if options.shard_ranks:
            command.append(f"parallel.shard_ranks={options.shard_ranks}")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MARKS": str(marks)}
        self.begun = time.time()
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def wait(self, name, without=frozenset()):
        """The marks `name` of all ranks whose processes are not in `without`: time, CPU seconds, rank and process
        id."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            for line in self.marks:
                at, cpu, rank, pid, mark, value = line.split()
                self.found.setdefault(mark, {})[int(pid)] = (float(at), float(cpu), int(rank), int(pid), float(value))
            found = [mark for pid, mark in self.found.get(name, {}).items() if pid not in without]
            if len(found) == self.ranks:
                return sorted(found, key=lambda mark: mark[2])
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit(f"no {name!r} of all ranks; the end of the output:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Ask to stop, and end whatever does not."""
        self.process.terminate()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            for pid in (self.process.pid, *self.found.get("imported", {})):
                command = Path(f"/proc/{pid}/environ")
                if command.exists() and str(self.folder).encode() in command.read_bytes():
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self.marks.close()


def pss_mib(pid):
    """Memory of a process; pages that N processes share count as 1/N."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


def open_files(pid):
    """The kinds of the open files of a process."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry))
    return found


def threads(pid):
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def thread_seconds(pid):
    """CPU seconds of the threads of Python, and of those that torch starts for gloo and the store."""
    seconds = {True: 0.0, False: 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread has ended
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
            user, system = map(int, fields.split()[11:13])
            seconds[name.startswith(("gloo_", "pt_"))] += (user + system) / os.sysconf("SC_CLK_TCK")
    return seconds[False], seconds[True]


def children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def mean(values):
    return statistics.fmean(values)


def measure(options, ranks):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Job(options, ranks, Path(folder)) as job:
        first = job.wait("step-1")
        saves = job.wait("saves")
        resting = job.wait("resting")
        manifest = Path(folder, "run", "checkpoints", f"step-{SAVES_AFTER:08d}", "manifest.json")
        while not manifest.exists():
            time.sleep(0.05)
        steps = [job.found[f"step-{number}"] for number in range(1, SAVES_AFTER + 1)]
        of_rank0 = [marks[first[0][3]][0] for marks in steps]
        pids = [mark[3] for mark in resting]
        seconds = [thread_seconds(pid) for pid in pids]
        files = [open_files(pid) for pid in pids]
        if options.files:
            kinds = [name.partition(":")[0] if not name.startswith("/") else name for name in files[-1]]
            print({name: kinds.count(name) for name in sorted(set(kinds))})
        helpers = [job.process.pid, *children(job.process.pid)]
        keys = [mark[4] for mark in job.found["keys"].values()]
        row = {
            "ranks": ranks,
            "first step s": max(mark[0] for mark in first) - job.begun,
            "step s": statistics.median(after - before for before, after in itertools.pairwise(of_rank0)),
            "save s": manifest.stat().st_mtime - max(mark[0] for mark in saves),
            "CPU s first step": mean(mark[1] for mark in first),
            "CPU s save": mean(mark[1] for mark in resting),
            "CPU s Python": mean(python for python, _ in seconds),
            "CPU s gloo": mean(gloo for _, gloo in seconds),
            "PSS MiB rank": mean(map(pss_mib, pids)),
            "PSS MiB launcher": sum(map(pss_mib, helpers)),
            "files most": max(map(len, files)),
            "files mean": mean(map(len, files)),
            "sockets mean": mean(sum(name.startswith("socket:") for name in of_rank) for of_rank in files),
            "threads": mean(map(threads, pids)),
            "keys": keys[0],
        }
        row |= dict.fromkeys(("restart s", "CPU s restart"), float("nan"))
        if not options.no_restart:
            killed = time.time()
            os.kill(pids[ranks // 2], signal.SIGKILL)
            again = job.wait("step-1", frozenset(pids))
            row["restart s"] = max(mark[0] for mark in again) - killed
            row["CPU s restart"] = mean(mark[1] for mark in again)
        if options.marks:
            for name in ("imported", "model", "ready", "step-1", f"step-{SAVES_AFTER}", "saves", "resting"):
                marks = [mark for pid, mark in job.found[name].items() if pid in pids]
                print(
                    f"    {name:9} from {min(m[0] for m in marks) - job.begun:6.2f} to "
                    f"{max(m[0] for m in marks) - job.begun:6.2f} s, CPU {mean(m[1] for m in marks):.3f}"
                )
    return row


def measure_mesh(shape):
    """CPU seconds, barriers and groups of one rank, without any other rank."""
    from unittest import mock

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = shape[0] * shape[1]
    dist.init_process_group("fake", store=FakeStore(), rank=size // 2, world_size=size)
    with mock.patch("torch.distributed.distributed_c10d._store_based_barrier") as barrier:
        begun = time.process_time()
        init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        taken = time.process_time() - begun
    groups = len(dist.distributed_c10d._world.pg_map) - 1
    print(f"{shape[0]} x {shape[1]} ranks: {taken:.4f} s of CPU, {barrier.call_count} barriers, {groups} groups")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--strategy", default="ddp", choices=("ddp", "fsdp"))
    parser.add_argument("--shard-ranks", type=int, help="shard over groups of this many ranks (FSDP)")
    parser.add_argument("--no-restart", action="store_true", help="leave out the kill and the restart")
    parser.add_argument("--files", action="store_true", help="also print the kinds of open files of the last rank")
    parser.add_argument("--marks", action="store_true", help="also print when ranks reached certain points")
    parser.add_argument("--mesh", type=int, nargs=2, help="number of replicas and shards of a hybrid mesh")
    parser.add_argument("keys", nargs="*", default=[], help="KEY=VALUE of the config")
    options = parser.parse_args()
    if options.mesh:
        measure_mesh(tuple(options.mesh))
        return
    header(*(name for name, _ in COLUMNS))
    for ranks in options.ranks:
        found = measure(options, ranks)
        row(*(form.format(found[name]) for name, form in COLUMNS))


if __name__ == "__main__":
    main()
