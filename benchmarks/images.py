"""Accuracy and time of image classification from scratch on small data sets: `image_folder` unchanged, and a plain CNN.

    python benchmarks/images.py FOLDER [FOLDER ...] [--seeds 3] [--epochs 60] [--only plain] [-o key=value ...]

Each FOLDER has `train/` and `val/` (or `test/`), with one folder per class. For each folder and seed it trains, one
after the other, in one process with one thread each:

- `lockstep train image_folder data.train=FOLDER` with its defaults, and the options of `-o`
- a plain CNN: four convolutions of 32 to 128 channels with batch norm and max-pooling, AdamW with a cosine, shifts and
  flips, in bf16 autocast, for `--epochs` epochs, or for as many as the recipe had (`--epochs 0`), with images of the
  recipe's size

It prints the accuracies on the evaluation images after the last epoch, their mean, the epochs, and the CPU seconds of
the process, which depend less on other load than wall-clock seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

EVAL = ("val", "test")


class Trained(NamedTuple):
    """The result of a training."""

    accuracy: float
    epochs: int
    seconds: float


def recipe(data: Path, options: list[str], seed: int) -> tuple[Trained, int]:
    """A training of the recipe, and the size of its evaluation images in pixels."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", "train", "image_folder", f"data.train={data}", f"seed={seed}"]
        command += ["log.pictures=0", *options, "--run-dir", f"{folder}/run"]
        used = _cpu_seconds()
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        entries = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        size = json.loads(next(Path(folder, "run").rglob("classification.json")).read_text())["size"]
        epochs = math.ceil(max(entry["epoch"] for entry in entries if "epoch" in entry) - 1e-6)
        accuracy = [entry["eval/accuracy"] for entry in entries if "eval/accuracy" in entry][-1]
        return Trained(accuracy, epochs, _cpu_seconds() - used), size


def plain(data: Path, epochs: int, size: int, seed: int) -> Trained:
    """The same with the plain CNN, in a separate process."""
    used = _cpu_seconds()
    command = [sys.executable, __file__, str(data), "--plain-cnn", f"{epochs},{size},{seed}"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return Trained(float(done.stdout), epochs, _cpu_seconds() - used)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def plain_cnn(data: Path, epochs: int, size: int, seed: int, batch: int = 64, shift: int = 4) -> float:
    """What somebody writes in half an hour: its accuracy after the last epoch."""
    import numpy as np
    import torch
    from PIL import Image
    from torch import nn
    from torch.nn import functional

    def read(folder: Path) -> tuple[Any, Any]:
        files = [
            (file, label) for label, kind in enumerate(sorted(folder.iterdir())) for file in sorted(kind.iterdir())
        ]
        pictures = [np.asarray(Image.open(file).convert("RGB").resize((size, size))) for file, _ in files]
        images = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float().div(127.5).sub(1)
        return images.contiguous(memory_format=torch.channels_last), torch.tensor([label for _, label in files])

    def block(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    images, labels = read(data / "train")
    blocks = [block(3, 32), block(32, 64), block(64, 128), block(128, 128)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, int(labels.max()) + 1)]
    model = nn.Sequential(*blocks, *head).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(images) // batch))
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(batch):
            part = functional.pad(images[rows], [shift] * 4)
            top, left = torch.randint(2 * shift + 1, (2,)).tolist()
            part = part[:, :, top : top + size, left : left + size]
            part = torch.where(torch.rand(len(rows), 1, 1, 1) < 0.5, part.flip(3), part)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(part)
            optimizer.zero_grad()
            functional.cross_entropy(logits.float(), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    images, labels = read(next(data / name for name in EVAL if (data / name).is_dir()))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = torch.cat([model(part).argmax(1) for part in images.split(200)])
    return (found == labels).float().mean().item()


def show(name: str, runs: list[Trained]) -> None:
    listed = ", ".join(f"{run.accuracy:.3f}" for run in runs)
    seconds = statistics.mean(run.seconds for run in runs)
    mean = statistics.mean(run.accuracy for run in runs)
    print(
        f"  {name}: accuracy {listed}, mean {mean:.3f}; {runs[0].epochs} epochs, {seconds:.0f} s of CPU time",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60, help="epochs of the plain CNN; 0: as many as the recipe")
    parser.add_argument("--only", choices=["recipe", "plain"])
    parser.add_argument("--size", type=int, default=64, help="image size for --only plain")
    parser.add_argument("-o", dest="options", action="append", default=[], help="add an option to the recipe")
    parser.add_argument("--plain-cnn", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain_cnn:
        print(plain_cnn(arguments.folders[0], *map(int, arguments.plain_cnn.split(","))))
        return
    for folder in arguments.folders:
        print(folder.name, flush=True)
        size, epochs = arguments.size, arguments.epochs
        if arguments.only != "plain":
            runs = [recipe(folder, arguments.options, seed) for seed in range(arguments.seeds)]
            size, epochs = runs[0][1], epochs or runs[0][0].epochs
            show(f"image_folder, {size} pixels", [run for run, _ in runs])
        if arguments.only != "recipe":
            show(f"plain CNN, {size} pixels", [plain(folder, epochs, size, seed) for seed in range(arguments.seeds)])


if __name__ == "__main__":
    main()
