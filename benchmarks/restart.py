"""Seconds from SIGKILL of one of two ranks to the end of the first step after the restart; and whether restarts hang.

    python benchmarks/restart.py [--rounds 9] [--restarts 20]

Lockstep (`lockstep train --max-restarts`) against a hand-written DDP loop that resumes from its `torch.save` checkpoint
under torch's own elastic agent. In each round both are started, and a rank is killed, the same in both, once it has saved.
What counts is the median of ratios. Then `--restarts` kills of a random rank at random times, in one Lockstep run.
The plain loop draws no bar and imports no TensorBoard; Lockstep runs with its defaults.

The parts, each until the later rank has done it:
agent    the others are ended and processes started     group  the process group is made; Lockstep's claim of the run directory
imports  Python, torch; Lockstep's connection to the    data   training data; Lockstep's search for a checkpoint, and its check
         store that ranks meet in                       model  model, checkpoint, DDP and the first batch        step   the first step
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
import time
from pathlib import Path

from restart_plain import BATCH, EVERY

HERE = Path(__file__).parent
PARTS = {"agent": "started", "imports": "imported", "group": "joined", "data": "model", "model": "loss", "step": "loss 2"}
LIMIT_S = 120.0


class Hang(Exception):
    """A restart that did not come to its first step."""


class Job:
    """A training of two ranks: `plain` or `lockstep`."""

    def __init__(self, which, folder, max_restarts):
        self.log, self.marks_file = folder / f"{which}.log", folder / f"{which}.marks"
        self.marks_file.touch()
        self.reading = self.marks_file.open()
        self.ranks, self.marks = {}, {}  # by pid: its rank; and its marks by name
        restarts = ("--max-restarts", str(max_restarts))
        if which == "plain":
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *restarts, str(HERE / "restart_plain.py")]
        else:
            command = [str(Path(sys.executable).parent / "lockstep"), "train", f"{HERE / 'restart_task.py'}:Marked", "--nproc", "2", *restarts]
            command += ["--run-dir", str(folder / "run"), f"batch.global={BATCH}", f"checkpoint.every_steps={EVERY}", "train.steps=100000000", "device=cpu"]
        environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "MARKS": str(self.marks_file)}
        environment["CHECKPOINT"] = str(folder / "plain.pt")
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, env=os.environ | environment, stdout=out, stderr=subprocess.STDOUT)

    def wait(self, pids_before, steps):
        """Until two new processes have begun their `steps`-th step; their pids by rank."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            for line in self.reading:
                at, rank, pid, name = line.split()
                self.ranks[int(pid)] = int(rank)
                self.marks.setdefault(int(pid), {}).setdefault(name, []).append(float(at))
            new = {rank: pid for pid, rank in self.ranks.items() if pid not in pids_before and len(self.marks[pid].get("loss", [])) >= steps}
            if len(new) == 2:
                return new
            if time.monotonic() > deadline or self.process.poll() is not None:
                ended = "no step" if self.process.returncode is None else f"exit code {self.process.returncode}"
                raise Hang(f"{ended} after {LIMIT_S - deadline + time.monotonic():.0f} s; the end of its output:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def kill(self, rank):
        """Kill a rank that has saved since it was started; seconds of the parts of the restart."""
        pids = self.wait(self.killed_before, 2 * EVERY)
        time.sleep(random.uniform(0, 2))
        before = set(self.ranks)
        os.kill(pids[rank], signal.SIGKILL)
        since = time.time()
        pids = self.wait(before, 2)
        parts = {}
        for part, name in PARTS.items():
            name, _, count = name.partition(" ")
            at = max(self.marks[pid][name][int(count or 1) - 1] for pid in pids.values())
            parts[part], since = at - since, at
        self.killed_before = before
        return parts

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
                if pid == self.process.pid or (command.exists() and b"restart_" in command.read_bytes()):
                    os.kill(pid, signal.SIGKILL)
        self.reading.close()


def compare(rounds):
    found = {"plain": [], "lockstep": []}
    for number in range(rounds):
        for which in ("plain", "lockstep") if number % 2 else ("lockstep", "plain"):
            with tempfile.TemporaryDirectory() as folder, Job(which, Path(folder), 3) as job:
                found[which].append(job.kill(number % 2))
        plain, ours = (sum(parts[-1].values()) for parts in found.values())
        print(f"round {number + 1}, rank {number % 2} killed: plain {plain:.2f} s, Lockstep {ours:.2f} s", flush=True)
    for which, rows in found.items():
        middle = ", ".join(f"{part} {statistics.median(row[part] for row in rows):.2f}" for part in PARTS)
        print(f"{which:8} {statistics.median(sum(row.values()) for row in rows):.2f} s: {middle}")
    ratios = [sum(ours.values()) / sum(plain.values()) for plain, ours in zip(*found.values(), strict=True)]
    print(f"ratio {statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


def in_a_row(restarts):
    times = []
    with tempfile.TemporaryDirectory() as folder, Job("lockstep", Path(folder), restarts) as job:
        try:
            for _ in range(restarts):
                times.append(sum(job.kill(random.randrange(2)).values()))
        except Hang as hang:
            print(hang)
    spread = f", {statistics.median(times):.1f} s each ({min(times):.1f} to {max(times):.1f})" if times else ""
    print(f"{len(times)} of {restarts} restarts in a row came back{spread}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--restarts", type=int, default=20)
    options = parser.parse_args()
    if options.rounds:
        compare(options.rounds)
    if options.restarts:
        in_a_row(options.restarts)


if __name__ == "__main__":
    main()
