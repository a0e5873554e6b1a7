"""False alarms and times of `lockstep verify`: every shipped recipe and the clean tasks of the tests.

    python benchmarks/verify.py [NAME ...] [--ranks 2,3] [--strategies ddp,fsdp] [--full] [--data DIR]

Each training is verified on each number of ranks with each strategy, on CPU, with all checks (`--quick` unless
`--full` is given). All of these trainings are right, so every fault is a false alarm. Recipes that need data take real
data from DIR (default: ../shared/data). Where the data are absent, the recipe is left out with a message. Worker
processes stay from one verification to the next, so the times do not include their start, for which a user waits once
per command.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lockstep.core.config import config_file  # noqa: E402
from lockstep.verify import command  # noqa: E402
from lockstep.verify.workers import Workers  # noqa: E402

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
            print(f"no {folder}: left out")
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
            print(f"no {folder}: left out")
    for name, options in CLEAN.items():
        common = [
            common
            for common in COMMON
            if not any(option.startswith(common.partition("=")[0] + "=") for option in options)
        ]
        found[name] = (
            f"{ROOT}/tests/verify/clean_tasks.py:{name}",
            [*common, *(option for option in options if not option.endswith("=null"))],
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--ranks", default="2,3")
    parser.add_argument("--strategies", default="ddp,fsdp")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    alarms = runs = 0
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
                        result = command.verify(
                            settings.model_dump(by_alias=True),
                            count,
                            folder,
                            quick=not options.full,
                            tell=lambda _: None,
                            workers=workers,
                        )
                        runs += 1
                        alarms += len(result.faults)
                        for check in result.checks:
                            seconds.setdefault(check.name, []).append(check.seconds)
                        others = [
                            f"{check.name}: {check.reason}" for check in result.checks if check.status != "passed"
                        ]
                        counts = f"{len(result.checks) - len(others):>2} passed {len(result.faults)} faults"
                        print(f"{target:<28} {count} {strategy:<5} {counts} {result.seconds:5.1f} s", flush=True)
                        for other in others:
                            print(f"    {other[:200]}", flush=True)
        finally:
            workers.close()
    print(f"{runs} verifications, {alarms} false alarms")
    for check, values in seconds.items():
        print(f"{check:<14} median {statistics.median(values):5.2f} s, most {max(values):5.2f} s")


if __name__ == "__main__":
    main()
