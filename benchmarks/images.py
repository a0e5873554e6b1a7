"""Accuracy and time of image classification from scratch on two small real data sets, on two cores.

    python benchmarks/images.py [--seeds 3] [--only fashion_mnist] [--data ../shared/data]

Each training is `lockstep train image_folder` on two ranks with one torch thread each, with the options below. What is
quoted is the accuracy of the last evaluation for each seed, and the seconds of the whole command: imports, training,
four evaluations and checkpoints. Fashion-MNIST has 2,000 training and 500 test images (a part of the whole), the blood
cells 225 and 75. An accuracy of 500 images has a standard error of 0.015, and of 75 images about 0.015 too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMON = ["precision=bf16", "compute.channels_last=true", "train.epochs=40", "train.eval_every_epochs=10"]
OPTIONS = {
    "fashion_mnist": ["task.channels=1", "task.image_size=28", "task.scratch.sizes.width=64"],
    "bccd_cells": ["task.image_size=48", "task.augment.vertical_flip=0.5", "batch.global=32"],
}
WANTED = {"fashion_mnist": 0.85, "bccd_cells": 0.97}


def train(data: Path, options: list[str], seed: int) -> tuple[float, float]:
    """The accuracy after the last epoch, and the seconds of the command."""
    command = [sys.executable, "-m", "lockstep", "train", "image_folder", "--nproc", "2"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"data.train={data}", *COMMON, *options, f"seed={seed}", "--run-dir", f"{folder}/run"]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        seconds = time.perf_counter() - began
        if done.returncode:
            sys.exit(done.stderr)
        entries = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return [entry["eval/accuracy"] for entry in entries if "eval/accuracy" in entry][-1], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=sorted(OPTIONS))
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else OPTIONS:
        data = arguments.data / "classification" / name
        if not data.is_dir():
            print(f"no {data}: left out")
            continue
        runs = [train(data, OPTIONS[name], seed) for seed in range(arguments.seeds)]
        accuracies, seconds = zip(*runs, strict=True)
        listed = ", ".join(f"{accuracy:.3f}" for accuracy in accuracies)
        times = ", ".join(f"{value:.0f}" for value in seconds)
        print(f"{name}: accuracy {listed}, mean {statistics.mean(accuracies):.3f} (wanted {WANTED[name]}); {times} s")


if __name__ == "__main__":
    main()
