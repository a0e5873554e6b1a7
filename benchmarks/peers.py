"""Lockstep compared with Lightning, Accelerate, transformers' Trainer and a plain loop: the same trainings,
interleaved.

    make bench-peers        # makes a venv with the pinned versions of benchmarks/peers.txt, and runs this
    python benchmarks/peers.py [--parts steps launch ...] [--rounds 5] [--systems ...] [--tiny]

All parts train one small network on the CPU with two ranks and one thread each, without progress bars and trackers.
Each system is used as documented: `peers_trainings.py`. Medians over rounds, with the least and the largest; in a round
the systems alternate. The last two columns are Lockstep's ratios to the plain loop and to the best peer, by round.

    steps    seconds per step; and processor time of a rank, which other programs disturb less
    launch   seconds from the command to the end of the first step
    save     seconds that a save pauses a training of --parameters weights, including background work
    restart  seconds from SIGKILL of a rank to the end of the next step, under torchrun; Lockstep under its own launcher
    exact    one update over 29 samples with unequal numbers of units: distance from the update of one process with
             all samples at once, as a fraction of this update
    resume   a training is killed in the middle of its second epoch, and restarted: samples that
             were trained twice, or never, in the whole training
    kill     all processes are killed while a checkpoint is written: how often the next start resumes, starts again,
             or fails
    text, lm    `text.py` and `lm.py`, which have their own tables
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ratios, spread

HERE = Path(__file__).resolve().parent
SYSTEMS = ("plain", "lockstep", "lightning", "accelerate", "trainer")
RANKS = 2
HANG_S = 300
LR_OF_WIDE = 1e-6
"""Wide networks diverge at the others' rate: Lockstep ends such a training, and the others continue with NaN."""
OTHERS = {
    "text": ["text.py", "--systems", "plain", "lockstep", "trainer"],
    "lm": ["lm.py", "--systems", "lockstep", "trl-packed", "trainer-padded", "plain"],
}


class Run:
    """A training of one system in a folder; it may be started several times."""

    def __init__(self, system, folder, **job):
        self.system, self.folder, self.starts = system, Path(folder), 0
        self.job = {"system": system, "folder": str(self.folder / "run")} | job
        Path(self.job["folder"]).mkdir(parents=True, exist_ok=True)
        if system == "lockstep":
            shutil.rmtree(self.job["folder"])

    def command(self, restarts):
        job, file = self.job, HERE / "peers_trainings.py"
        if self.system != "lockstep":
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            return [*torchrun, "--max-restarts", str(restarts), str(file)]
        batch, accumulate = job.get("batch", 10), job.get("accumulate", 1)
        keys = {
            "train.epochs": job.get("epochs", 1),
            "train.parts": f"[{file}:Notes]",
            "batch.global": batch * accumulate,
            "batch.micro": batch // RANKS,
            "optim.name": "SGD",
            "optim.lr": job.get("lr", 0.1),
            "optim.clip_norm": "null",
            "optim.weight_decay": 0,
            "checkpoint.every_steps": job.get("save_every", 0),
            "checkpoint.every_minutes": "null",
            "log.writers": "[]",
            "log.every_steps": 1000,
            "device": "cpu",
        }
        settings = [f"{key}={value}" for key, value in keys.items()]
        given = ["--nproc", str(RANKS), "--run-dir", job["folder"], "--max-restarts", str(restarts)]
        return [sys.executable, "-m", "lockstep", "train", f"{file}:Regression", *settings, *given]

    def start(self, restarts=0, **change):
        """Start the training in its own session."""
        self.notes = self.folder / f"notes-{self.starts}"
        self.notes.mkdir(parents=True)
        self.starts += 1
        environment = os.environ | {
            "JOB": json.dumps(self.job | change),
            "NOTES": str(self.notes),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # an installation has compiled files
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "TRANSFORMERS_VERBOSITY": "error",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.log = open(self.folder / f"log-{self.starts}.txt", "w")
        self.begun = time.time()
        self.process = subprocess.Popen(
            self.command(restarts), env=environment, stdout=self.log, stderr=self.log, start_new_session=True
        )
        return self

    def wait(self):
        """The exit code, or None after a hang, which is ended."""
        try:
            return self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()

    def kill(self):
        """Kill all processes of the training."""
        for pid in [self.process.pid, *_below(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def read(self, rank=0):
        """The notes of a rank in order. A line that a kill has truncated is left out."""
        path, found = self.notes / f"rank-{rank}.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def steps(self, rank=0):
        return [note for note in self.read(rank) if "step" in note]

    def wait_for(self, condition):
        """Wait until `condition` is true. False: the training has ended before, or hangs."""
        deadline = time.time() + HANG_S
        while not condition():
            if self.process.poll() is not None or time.time() > deadline:
                return False
            time.sleep(0.002)
        return True


def _below(pid):
    """The processes that a process has started, and those that these have started."""
    parents = collections.defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.read_text().rpartition(")")[2].split()[1])].append(int(path.parent.name))
        except OSError:
            continue
    found = [pid]
    for one in found:
        found += parents[one]
    return found[1:]


def _finished(run):
    code = run.wait()
    if code != 0:
        raise RuntimeError(
            f"{run.system} ended with {code}: {(run.folder / f'log-{run.starts}.txt').read_text()[-2000:]}"
        )
    return run


def _gaps(run, skipped=5, clock="at"):
    """Seconds from step to step, without the first."""
    at = [note[clock] for note in run.steps()][skipped:]
    return [later - earlier for earlier, later in itertools.pairwise(at)]


def steps(system, folder, options, clock="at"):
    job = {"samples": 200 if options.tiny else 4000, "width": 64 if options.tiny else 256}
    return statistics.median(_gaps(_finished(Run(system, folder, **job).start()), clock=clock))


def launch(system, folder, options):
    run = _finished(Run(system, folder, samples=50).start())
    return run.steps()[0]["at"] - run.begun


def save(system, folder, options):
    width = 100 if options.tiny else int((options.parameters * 1e6) ** 0.5)
    job = {"samples": 410, "width": width, "save_every": 10, "lr": LR_OF_WIDE}
    without = statistics.median(_gaps(_finished(Run(system, folder / "without", **job | {"save_every": 0}).start())))
    gaps = _gaps(_finished(Run(system, folder / "with", **job).start()))
    saves = len(gaps) // job["save_every"]
    return (sum(gaps) - len(gaps) * without) / saves


def restart(system, folder, options):
    run = Run(system, folder, samples=200, epochs=10_000, save_every=20).start(restarts=3)
    try:
        if not run.wait_for(lambda: len(run.steps(1)) > 50):
            raise RuntimeError(f"{system} did not train")
        victim = run.steps(1)[-1]["pid"]
        os.kill(victim, signal.SIGKILL)
        killed = time.time()
        again = lambda: [note for note in run.steps(1) if note["pid"] != victim]  # noqa: E731
        return again()[0]["at"] - killed if run.wait_for(again) else None
    finally:
        run.kill()


def exact(system, folder, options):
    import torch

    sys.path.insert(0, str(HERE))
    from peers_trainings import Samples, mean_loss, network

    run = _finished(Run(system, folder, samples=29, batch=8, accumulate=4, width=32).start())
    os.environ.pop("JOB", None)
    begin, right = network().state_dict(), network()
    optimizer = torch.optim.SGD(right.parameters(), lr=0.1)
    mean_loss(right, torch.utils.data.default_collate(list(Samples(29)))).backward()
    optimizer.step()
    found = torch.load(run.notes / "end.pt")
    flat = lambda state: torch.cat([tensor.flatten() for tensor in state.values()])  # noqa: E731
    update = flat(right.state_dict()) - flat(begin)
    return float((flat(found) - flat(right.state_dict())).norm() / update.norm())


def resume(system, folder, options):
    """Samples trained twice, and samples left out, in a training of two epochs."""
    run = Run(system, folder, samples=200, epochs=2, save_every=5)
    run.start(die_at=28).wait()
    before = [_by_step(run.read(rank)) for rank in range(RANKS)]
    _finished(run.start())
    after = [_by_step(run.read(rank)) for rank in range(RANKS)]
    kept = min(after[0]) - 1
    counts = collections.Counter()
    for earlier, later in zip(before, after, strict=True):
        for step, samples in [*((s, i) for s, i in earlier.items() if s <= kept), *later.items()]:
            counts.update(samples)
            assert step <= 60
    twice = sum(max(0, counts[index] - 2) for index in range(200))
    never = sum(max(0, 2 - counts[index]) for index in range(200))
    return f"{twice} / {never} (from step {kept}, {max(after[0])} steps)"


def _by_step(notes):
    found, pending = {}, []
    for note in notes:
        pending = [] if "start" in note else pending + note.get("samples", [])
        if "step" in note:
            found[note["step"]], pending = pending, []
    return found


def kill(system, folder, options):
    """What the start after a kill does: it resumes, starts again, or fails."""
    width = 200 if options.tiny else int((options.parameters * 1e6) ** 0.5)
    run = Run(system, folder, samples=200, epochs=2, width=width, save_every=5, lr=LR_OF_WIDE).start()
    ready = run.wait_for(lambda: len(run.steps()) >= 10)  # one checkpoint is complete; the second one starts now
    if not ready:
        raise RuntimeError(f"{system} did not train: {(folder / 'log-1.txt').read_text()[-2000:]}")
    time.sleep(random.random() * (0.1 if options.tiny else 1.0))
    run.kill()
    code = run.start().wait()
    if code != 0 or not run.steps():
        return "fails"
    return "resumes" if run.steps()[0]["step"] > 1 else "starts again"


PARTS = {
    "steps": (steps, 1e3, "ms per step"),
    "processor": (functools.partial(steps, clock="processor"), 1e3, "ms of processor time of a rank per step"),
    "launch": (launch, 1, "s from the command to the first step"),
    "save": (save, 1, "s that a save pauses training"),
    "restart": (restart, 1, "s from the kill of a rank to the next step"),
    "exact": (exact, 1, "distance from the correct update, as a fraction of it"),
    "resume": (resume, None, "samples trained twice / left out"),
    "kill": (kill, None, "start after a kill while saving"),
}
ONCE = ("exact", "resume")


def measure(name, systems, options, folder):
    """A row for each part: the result of each system."""
    function, scale, _ = PARTS[name]
    values = {system: [] for system in systems}
    rounds = 1 if name in ONCE else options.rounds
    for number in range(rounds):
        for system in systems[number % len(systems) :] + systems[: number % len(systems)]:
            place = folder / f"{name}-{number}-{system}"
            place.mkdir()
            print(f"{name}, round {number + 1} of {rounds}: {system}", file=sys.stderr, flush=True)
            try:
                values[system].append(function(system, place, options))
            except RuntimeError as error:
                print(f"{name}, {system}: {error}", file=sys.stderr, flush=True)
                values[system].append(None)
            print(f"    {values[system][-1]}", file=sys.stderr, flush=True)
            shutil.rmtree(place, ignore_errors=True)
    row = {system: _shown(found, scale) for system, found in values.items()} | {"of plain": "", "of the best peer": ""}
    if scale is not None and rounds > 1 and "lockstep" in systems:
        row["of plain"] = _ratio(values, "plain") if "plain" in systems else ""
        best = _best(values)
        row["of the best peer"] = f"{_ratio(values, best)}, {best}" if best else ""
    return row


def _shown(found, scale):
    if scale is None:
        counts = collections.Counter("failed" if one is None else one for one in found)
        return ", ".join(
            text if len(found) == 1 else f"{text} {count} of {len(found)}" for text, count in counts.items()
        )
    numbers = [scale * one for one in found if one is not None]
    failed = f", {len(found) - len(numbers)} failed" if len(numbers) < len(found) else ""
    if not numbers:
        return "failed"
    return f"{spread(numbers, '.3g')}{failed}" if len(numbers) > 1 else f"{numbers[0]:.3g}{failed}"


def _best(values):
    """The peer with the least median. Empty: there is none."""
    medians = {
        system: statistics.median([one for one in found if one is not None])
        for system, found in values.items()
        if system not in ("plain", "lockstep") and any(one is not None for one in found)
    }
    return min(medians, key=medians.get, default="")


def _ratio(values, other):
    """Lockstep's values over those of another system, round by round."""
    pairs = [pair for pair in zip(values["lockstep"], values[other], strict=True) if None not in pair]
    return spread(ratios(*zip(*pairs, strict=True))) if pairs else ""


def versions():
    from importlib import metadata

    names = ("torch", "lightning", "accelerate", "transformers", "trl", "torch-lockstep")
    found = {name: metadata.version(name) for name in names if _is_installed(name)}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _is_installed(name):
    from importlib import metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, *OTHERS], default=[*PARTS, *OTHERS])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parameters", type=float, default=20, help="millions of parameters of the saved models")
    parser.add_argument("--tiny", action="store_true", help="use small sizes, which only show that it runs")
    options = parser.parse_args()
    print(versions(), flush=True)
    columns = [*options.systems, "of plain", "of the best peer"]
    print(f"\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-peers-") as folder:
        for name in [part for part in options.parts if part in PARTS]:
            row = measure(name, options.systems, options, Path(folder))
            print(f"| {name}: {PARTS[name][2]} | {' | '.join(row.values())} |", flush=True)
    for name in [part for part in options.parts if part in OTHERS]:
        print(f"\n{name}", flush=True)
        rounds, small = ["--rounds", str(options.rounds)], ["--steps", "3"] if options.tiny else []
        subprocess.run([sys.executable, HERE / OTHERS[name][0], *OTHERS[name][1:], *rounds, *small], check=False)


if __name__ == "__main__":
    main()
