"""False alarms and times of `lockstep verify` on correct trainings.

    python benchmarks/verify.py recipes [NAME ...] [--ranks 2,3] [--strategies ddp,fsdp] [--full] [--data DIR]
    python benchmarks/verify.py unusual [NAME ...] [--nproc 2] [--checks a,b] [--full] [--timeout-s 240]
    python benchmarks/verify.py models [FAMILY ...] [--nproc 2] [--checks a,b] [--full] [--steps 4]

`recipes`: every shipped recipe and the clean tasks of the tests, on each number of ranks with each strategy, on CPU.
Recipes that need data use real data from DIR (default: ../shared/data), and are skipped with a message if these are
missing. Worker processes stay from one verification to the next, so the times do not include their start.

`unusual`: the tasks of `packages/lab/tests/verify/unusual_models.py`, `unusual_losses.py` and `unusual_data.py`, with
the command. A command that does not end also counts as a false alarm.

`models`: small, new models of many families of the package `transformers`, from
`packages/lab/tests/verify/transformer_models.py`.

All of them are correct, so each fault is a false alarm, or a true statement about a model. A line reports how many
checks passed; lines below it list those that were not shown or found a fault, with the reason. All checks run as with
`--quick`, unless `--full` is given. The exit code is 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from lockstep.configs import config_file  # noqa: E402
from lockstep.core.errors import LockstepError  # noqa: E402
from lockstep.core.task import Task  # noqa: E402
from lockstep_lab.verify import command  # noqa: E402
from lockstep_lab.verify.result import CheckResult  # noqa: E402
from lockstep_lab.verify.workers import Workers  # noqa: E402

COMMON = ["optim.lr=0.01", "batch.global=40"]
CLEAN: dict[str, list[str]] = {
    "Base": [],
    "BatchNorm": [],
    "Dropout": ["parallel.gradient_as_bucket_view=false"],
    "Attention": ["optim.clip_norm=0.5"],
    "Recurrent": ["optim.name=SGD", "optim.lr=0.2", "optim.args={momentum: 0.9}"],
    "Tokens": ["data.workers=1"],
    "Rare": ["train.ema_decay=0.9"],
    "Augmented": ["data.workers=1", "schedule.name=cosine", "schedule.warmup_steps=100", "train.steps=400"],
    "Horizons": ["optim.lr_scaling=linear", "schedule.name=step"],
    "Blocks": ["precision=fp16", "optim.clip_norm=1.0", "compute.activation_checkpointing=true"],
    "Smoothed": ["precision=bf16"],
    "NoEvaluation": ["batch.global=null", "batch.per_rank=10", "batch.accumulate=2"],
}


def targets(data: Path) -> dict[str, tuple[str, list[str]]]:
    """The trainings by name, each with the target of `lockstep verify` and its overrides."""
    found: dict[str, tuple[str, list[str]]] = {
        "digits": ("digits", []),
        "toy": ("toy", []),
        "docstrings": ("docstrings", []),
    }
    for name, held_out, options in [("bccd_cells", "val", []), ("fashion_mnist", "test", ["task.channels=1"])]:
        folder = data / "classification" / name
        if folder.is_dir():
            found[f"image_folder {name}"] = (
                "image_folder",
                [f"data.train={folder}/train", f"data.eval={folder}/{held_out}", *options],
            )
        else:
            print(f"{folder} does not exist: skipped")
    for name in ("ag_news", "banking77"):
        folder = data / "text" / name
        if folder.is_dir():
            sizes = "{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 128}"
            scratch = f"task.scratch={{architecture: bert, vocab_size: 4000, sizes: {sizes}}}"
            options = [scratch, "optim.lr=0.001", f"name={name}"]
            found[f"text {name}"] = (
                "text",
                [f"data.train={folder}/train.csv", f"data.eval={folder}/test.csv", *options],
            )
        else:
            print(f"{folder} does not exist: skipped")
    for name, options in CLEAN.items():
        common = [
            common
            for common in COMMON
            if not any(option.startswith(common.partition("=")[0] + "=") for option in options)
        ]
        found[name] = (
            f"{ROOT}/packages/lab/tests/verify/clean_tasks.py:{name}",
            [*common, *(option for option in options if not option.endswith("=null"))],
        )
    return found


def told(name: str, results: Sequence[CheckResult], seconds: float) -> bool:
    """Print the results of a training's checks. True if one found a fault."""
    others = [one for one in results if one.status != "passed"]
    is_fault = any(one.status == "fault" for one in others)
    counts = f"{len(results) - len(others):>2} passed, {len(others)} not  ({seconds:.0f} s)"
    print(f"{'FAULT' if is_fault else 'right'} {name:<36} {counts}", flush=True)
    for one in others:
        print(f"    {one.status:<9} {one.name}: {one.reason[:400]}", flush=True)
    return is_fault


def recipes(options: argparse.Namespace) -> int:
    """The number of false alarms in recipes and clean tasks."""
    seconds: dict[str, list[float]] = {}
    alarms = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workers = Workers(folder / "ranks.log")
        workers.run(max(map(int, options.ranks.split(","))), int)
        try:
            for target, (what, overrides) in targets(options.data).items():
                if options.names and target not in options.names:
                    continue
                for count in map(int, options.ranks.split(",")):
                    for strategy in options.strategies.split(","):
                        settings = config_file.load(what, [*overrides, f"parallel.strategy={strategy}", "device=cpu"])
                        settings = settings.model_copy(update={"batch": settings.batch.resolve(count)})
                        config = settings.model_dump(by_alias=True)
                        how = {"quick": not options.full, "tell": lambda _: None, "workers": workers}
                        result = command.verify(config, count, folder, **how)
                        alarms += told(f"{target} {count} {strategy}", result.checks, result.seconds)
                        for check in result.checks:
                            seconds.setdefault(check.name, []).append(check.seconds)
        finally:
            workers.close()
    for check, values in seconds.items():
        print(f"{check:<14} median {statistics.median(values):5.2f} s, most {max(values):5.2f} s")
    return alarms


def by_command(task: type[Task], options: argparse.Namespace) -> list[CheckResult]:
    """The checks of a verification with `lockstep verify`; a fault if there are none."""
    from packages.lab.tests.verify.unusual_tasks import arguments

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", "verify", *arguments(task)]
        command += ["--nproc", str(options.nproc), "--run-dir", folder]
        command += [] if options.full else ["--quick"]
        command += ["--checks", options.checks] if options.checks else []
        # In its own session, so that the ranks of a command that hangs end with it.
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)
        try:
            output, _ = process.communicate(timeout=options.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            last = (output.decode().strip().splitlines() or ["nothing was printed"])[-1]
            return [CheckResult("fault", f"it did not end within {options.timeout_s} s: {last}", name="command")]
        written = Path(folder, "verify.json")
        checks = json.loads(written.read_text())["checks"] if written.exists() else []
    found = [CheckResult(check["status"], check["reason"], name=check["name"]) for check in checks]
    return found or [CheckResult("fault", " ".join(output.decode().split())[-400:], name="command")]


def unusual(options: argparse.Namespace) -> int:
    """The number of false alarms in correct but unusual tasks."""
    from packages.lab.tests.verify.unusual_tasks import tasks

    known, alarms = tasks(), 0
    for name in options.names or known:
        begun = time.perf_counter()
        alarms += told(name, by_command(known[name], options), time.perf_counter() - begun)
    return alarms


def models(options: argparse.Namespace) -> int:
    """The number of families of models with a fault."""
    from packages.lab.tests.verify.transformer_models import FAMILIES, arguments

    faults = 0
    how = {"checks": options.checks.split(",") if options.checks else (), "quick": not options.full}
    with tempfile.TemporaryDirectory() as root:
        workers = Workers(Path(root, "verify.log"))  # the same processes for all families: transformers loads slowly
        try:
            for family in options.names or FAMILIES:
                begun = time.perf_counter()
                target, *overrides = arguments(family)
                try:
                    settings = config_file.load(target, overrides)
                    settings = settings.model_copy(update={"batch": settings.batch.resolve(options.nproc)})
                    config, place = settings.model_dump(by_alias=True), Path(root, family)
                    more = {"tell": lambda _: None, "steps": options.steps, "workers": workers}
                    results = command.verify(config, options.nproc, place, **how, **more).checks
                except LockstepError as error:
                    results = [CheckResult("fault", str(error), name="task")]
                faults += told(family, results, time.perf_counter() - begun)
        finally:
            workers.close()
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("recipes", "unusual", "models"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--ranks", default="2,3", help="of recipes")
    parser.add_argument("--strategies", default="ddp,fsdp", help="of recipes")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="of recipes")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--checks", default="")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="time limit of a command for an unusual task")
    parser.add_argument("--steps", type=int, help="steps of each training that is compared with another")
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    alarms = {"recipes": recipes, "unusual": unusual, "models": models}[options.kind](options)
    print(f"{alarms} false alarms")
    sys.exit(alarms > 0)


if __name__ == "__main__":
    main()
