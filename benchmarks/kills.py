"""Kill a training twenty times; the final weights must be bitwise equal to those of an undisturbed run.

    python benchmarks/kills.py [--random 10] [--whole 5] [--seed 0] [KEY=VALUE ...]

2 ranks, DDP unless another strategy is given, digits, 600 steps with a checkpoint every 10. One command gets a SIGKILL
of one rank at each stage of a checkpoint write and inside an evaluation, and at random times (start-up included), and
restarts its ranks each time. In another run, the launcher and all ranks are killed at random times, and the command is
run again. The comparison covers the weights, the optimizer state, and the ledger: which samples every step used, on
which rank.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from lockstep.core import build
from lockstep.core.checkpoint import files, store
from lockstep_recipes.tasks.vision.classification.options import ClassificationOptions
from lockstep_recipes.tasks.vision.classification.task import Classification

STAGES = [
    "staged",
    "before-share",
    "in-share",
    "before-fsync",
    "after-share",
    "before-manifest",
    "in-manifest",
    "before-rename",
    "after-rename",
    "evaluating",
]
ONLY_RANK_0 = STAGES[5:9]
STEPS = 600
BETWEEN_S = (0.5, 3.0)  # seconds from a kill to the next; a start takes about half a second
SETTINGS = [
    f"train.steps={STEPS}",
    "train.eval_every_steps=25",
    "checkpoint.every_steps=10",
    "batch.global=64",
    "optim.lr=0.003",
    "optim.clip_norm=1.0",
]
SETTINGS += ["schedule.name=cosine", "schedule.warmup_steps=20", "log.writers=[text_log,json_lines]", "device=cpu"]


_step = build.train_step


def _noting(run, micros, samples, want_norm=False):
    outcome = _step(run, micros, samples, want_norm=want_norm)
    used = sorted(index for micro in micros if not micro.filler for index in micro.indices)
    with open(os.environ["LEDGER"], "a") as file:  # one write: lines of several processes do not mix
        file.write(f"{outcome.step} {run.world.rank} {os.getpid()} {','.join(map(str, used))}\n")
    return outcome


class Digits(Classification):
    """The recipe digits, with a ledger: which samples each optimizer step used."""

    def __init__(self, train="digits", eval="digits", width=32):
        build.train_step = _noting
        augment = {"crop": "shift", "shift": 1, "flip": 0, "fill": 0}
        options = {"channels": 1, "scratch": {"sizes": {"width": width}}, "augment": augment}
        super().__init__(ClassificationOptions.model_validate(options), train, eval)


def start(run, environment, restarts):
    lockstep = str(Path(sys.executable).parent / "lockstep")
    command = [
        lockstep,
        "train",
        f"{Path(__file__).resolve()}:Digits",
        *SETTINGS,
        "--nproc",
        "2",
        "--max-restarts",
        str(restarts),
        "--run-dir",
        str(run),
    ]
    log = (run.parent / f"{run.name}.log").open("a")
    return subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True)


def ranks_of(launcher):
    """Pids of the running ranks, which are forked from a child of the launcher."""
    try:
        return [rank for child in children(launcher) for rank in children(child)]
    except OSError:
        return []


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def result(run, ledger):
    """The final state, and by step what each rank used; repeated steps must have used the same again."""
    newest = store.listed(run / "checkpoints")[0]
    assert newest.step == STEPS, newest.step
    assert not store.check(newest)
    used = collections.defaultdict(set)
    for line in ledger.read_text().splitlines():
        step, rank, _, indices = line.split(" ")
        used[int(step), int(rank)].add(indices)
    return dict(files.read(newest.path, newest.index)), used


def compare(name, expected, found):
    weights = (
        all(torch.equal(expected[0][key], found[0][key]) for key in expected[0])
        and expected[0].keys() == found[0].keys()
    )
    print(
        f"{name}: weights and optimizer state bit-identical: {weights}; "
        f"ledger of {len(found[1])} entries exact: {expected[1] == found[1]}",
        flush=True,
    )
    return weights and expected[1] == found[1]


def kill_ranks(folder, count, rng):
    """One command; `count` kills at random times, and one at each stage."""
    faults = []
    for number, stage in enumerate(STAGES):
        rank = 0 if stage in ONLY_RANK_0 else number % 2
        step = 25 * (1 + number % 7) if stage == "evaluating" else 20 + 10 * number
        faults.append(f"{rank}:{step}:{stage}:kill:{folder / stage}")
    launcher = start(
        folder / "ranks",
        {"LEDGER": str(folder / "ranks.ledger"), "LOCKSTEP_FAIL_AT": " ".join(faults)},
        restarts=3 * (count + len(STAGES)),
    )
    killed = 0
    while launcher.poll() is None:
        time.sleep(rng.uniform(*BETWEEN_S))
        ranks = ranks_of(launcher.pid)
        if killed < count and len(ranks) == 2:
            os.kill(rng.choice(ranks), signal.SIGKILL)
            killed += 1
    staged = [stage for stage in STAGES if (folder / stage).exists()]
    restarts = (folder / "ranks.log").read_text().count(": restart ")
    print(
        f"one command: {killed} random kills, {len(staged)} kills at stages ({', '.join(staged)}), "
        f"{restarts} restarts, exit code {launcher.returncode}"
    )
    return launcher.returncode == 0 and len(staged) == len(STAGES) and killed == count


def kill_all(folder, count, rng):
    """The command again and again; launcher and ranks are killed together at random times."""
    for number in range(count + 1):
        launcher = start(folder / "whole", {"LEDGER": str(folder / "whole.ledger")}, restarts=0)
        if number == count:
            return launcher.wait() == 0
        time.sleep(rng.uniform(1, 6))
        if launcher.poll() is not None:
            print(f"the training had ended before kill {number + 1}")
            return False
        for pid in [launcher.pid, *ranks_of(launcher.pid)]:
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=10)
    parser.add_argument("--whole", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="config keys, such as parallel.strategy=fsdp")
    arguments = parser.parse_args()
    SETTINGS.extend(arguments.overrides)
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert start(folder / "undisturbed", {"LEDGER": str(folder / "undisturbed.ledger")}, restarts=0).wait() == 0
        expected = result(folder / "undisturbed", folder / "undisturbed.ledger")
        good = kill_ranks(folder, arguments.random, rng) and kill_all(folder, arguments.whole, rng)
        for run, text in (
            (("ranks", "one command"), ("whole", f"{arguments.whole} kills of everything")) if good else ()
        ):
            good &= compare(text, expected, result(folder / run, folder / f"{run}.ledger"))
        if not good:
            for log in folder.glob("*.log"):
                print(f"---- {log.name}\n{log.read_text()[-4000:]}")
            sys.exit(1)


if __name__ == "__main__":
    main()
