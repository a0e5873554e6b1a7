"""Seconds from the command to the end of the first step, each in its own processes, against a hand-written plain loop.

    python benchmarks/startup.py [--rounds 7] [--ranks 1 2 8] [--launches 0]

The plain loop runs as `python` on one rank and under `torchrun` on several; Lockstep as `lockstep train`, and with
`--cold`. The three alternate; what counts is the median of ratios to the plain loop. Then the memory of all processes
while they train (pages that processes share are divided among them: PSS), `lockstep --help`, and `import lockstep`.

`--launches N` starts N trainings of two ranks one after another and prints which processes and files are left over.
"""

from __future__ import annotations

import argparse
import glob
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
LOCKSTEP = str(Path(sys.executable).parent / "lockstep")


def first_step(command, folder):
    mark = folder / "mark"
    mark.unlink(missing_ok=True)
    begun = time.time()
    subprocess.run(
        command,
        check=True,
        env=os.environ | {"MARK": str(mark), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return float(mark.read_text()) - begun


def seconds(command):
    begun = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.time() - begun


def commands(ranks, folder, steps=2):
    """The plain loop, Lockstep, and Lockstep with cold starts."""
    plain = [sys.executable, str(HERE / "startup_plain.py")]
    if ranks > 1:
        plain = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *plain[1:]]
    task = [f"{HERE / 'startup_task.py'}:Marked", "device=cpu", f"train.steps={steps}"]
    ours = [LOCKSTEP, "train", *task, "--nproc", str(ranks), "--run-dir", str(folder / "run"), "--fresh"]
    return {"plain": plain, "lockstep": ours, "lockstep --cold": [*ours, "--cold"]}


def compare(ranks, rounds, folder):
    times = {name: [] for name in commands(ranks, folder)}
    for _ in range(rounds + 1):
        for name, command in commands(ranks, folder).items():
            times[name].append(first_step(command, folder))
    plain = times["plain"][1:]
    print(f"{ranks} ranks: plain {statistics.median(plain):.2f} s", flush=True)
    for name in list(times)[1:]:
        ratios = [ours / theirs for ours, theirs in zip(times[name][1:], plain, strict=True)]
        print(
            f"  {name}: {statistics.median(times[name][1:]):.2f} s, "
            f"ratio {statistics.median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def processes():
    """The parent of each process of this machine, by process."""
    parents = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path) as file:
                text = file.read()
        except OSError:
            continue
        parents[int(path.split("/")[2])] = int(text.rpartition(")")[2].split()[1])
    return parents


def tree(pid):
    """A process and all that it started."""
    parents, found = processes(), [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found


def proportional_mb(pid):
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def memory(ranks, folder):
    for name, command in commands(ranks, folder, steps=1_000_000).items():
        if name == "plain":
            continue
        mark = folder / "mark"
        mark.unlink(missing_ok=True)
        job = subprocess.Popen(
            command,
            env=os.environ | {"MARK": str(mark), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not mark.exists():
            time.sleep(0.1)
        time.sleep(3)
        parts = sorted((proportional_mb(pid) for pid in tree(job.pid)), reverse=True)
        print(f"{ranks} ranks, {name}: {sum(parts):.0f} MB in {len(parts)} processes", flush=True)
        job.terminate()
        job.wait()


def left_over(launches, folder):
    """Launch again and again with a folder of our own for temporary files, which also marks our processes."""
    temporary = folder / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    mark = f"TMPDIR={temporary}\0".encode()

    def is_ours(pid):
        try:
            return mark in Path(f"/proc/{pid}/environ").read_bytes() and pid != os.getpid()
        except OSError:
            return False

    before = set(os.listdir("/dev/shm"))
    for launch in range(1, launches + 1):
        first_step(commands(2, folder)["lockstep"], folder)
        if launch % 10 == 0 or launch == launches:
            time.sleep(1)
            left = [pid for pid in processes() if is_ours(pid)]
            shared = sorted(set(os.listdir("/dev/shm")) - before)
            print(f"{launch} launches left processes {left} and files {os.listdir(temporary)} {shared}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--launches", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.launches:
            left_over(options.launches, folder)
            return
        for ranks in options.ranks:
            compare(ranks, options.rounds, folder)
            memory(ranks, folder)
    helps = [seconds([LOCKSTEP, "--help"]) for _ in range(options.rounds)]
    imports = [seconds([sys.executable, "-c", "import lockstep"]) for _ in range(options.rounds)]
    print(f"lockstep --help: {statistics.median(helps):.3f} s; import lockstep: {statistics.median(imports):.3f} s")


if __name__ == "__main__":
    main()
