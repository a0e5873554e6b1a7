"""Mean IoU and time of segmentation from scratch on two small real data sets, on two cores.

    python benchmarks/segmentation.py [--only camvid] [--plain] [--epochs 6] [--rounds 3] [--data ../shared/data]
        [--keep FOLDER]

Each training is `lockstep train segmentation` on two ranks with one torch thread each, with the options below. The
results are the mean IoU of the last evaluation, at the original resolution of the images, the seconds of the whole
command (imports, training, evaluations, checkpoints, images), and the trained samples per second.

With `--plain`, the same network also trains in a loop of plain PyTorch on one core per process without Lockstep's
loader, engine and evaluation: DistributedDataParallel, the same number of samples, the same augmentation, optimizer
and schedule, and its own confusion matrix. It evaluates once, after the last step; Lockstep also evaluates half-way,
except with `--epochs`. The results are the CPU seconds of all processes of each command, including imports, which other
processes on the machine affect less than wall-clock time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMON = ["precision=bf16", "compute.channels_last=true", "optim.lr=0.003"]
JITTER = "color_jitter: {brightness: 0.4, contrast: 0.4, saturation: 0.4}"
OPTIONS = {
    "camvid": [
        "task.scratch.sizes={width: 32, stride: 4, norm: batch}",
        "task.image_size=256",
        "task.eval_size=256",
        "task.class_weights=balanced_sqrt",
        "task.augment={scale: [0.25, 1.0], flip: 0.5}",
        "train.epochs=130",
        "train.eval_every_epochs=65",
    ],
    "nuclei": [
        "task.classes=[background, nucleus]",
        "task.scratch.sizes={width: 16, depth: 3, stride: 1}",
        "task.image_size=192",
        f"task.augment={{scale: [0.2, 1.0], flip: 0.5, vertical_flip: 0.5, {JITTER}}}",
        "train.epochs=40",
        "train.eval_every_epochs=20",
    ],
}
WANTED = {"camvid": 0.46, "nuclei": 0.90}
RANKS = 2


def entries_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class CpuSeconds:
    """CPU seconds of all processes that a program starts, polled a few times per second.

    The kernel's sum lacks processes whose parent does not wait for them.
    """

    def __init__(self) -> None:
        self.by_process: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CpuSeconds:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def total(self) -> float:
        return sum(self.by_process.values())

    def _watch(self) -> None:
        tick = os.sysconf("SC_CLK_TCK")
        while not self._ended.wait(0.2):
            for number in sorted(int(path.name) for path in Path("/proc").glob("[0-9]*")):
                with contextlib.suppress(OSError):
                    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                    if number in self.by_process or int(fields[1]) in {os.getpid(), *self.by_process}:
                        self.by_process[number] = (int(fields[11]) + int(fields[12])) / tick


def train(data: Path, options: list[str], run: Path) -> tuple[dict[str, float], float]:
    """The results of the last evaluation, and the seconds of the command."""
    command = [sys.executable, "-m", "lockstep", "train", "segmentation", "--nproc", str(RANKS), "--run-dir", str(run)]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, f"data.train={data}", *COMMON, *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(done.stderr)
    return [entry for entry in entries_of(run) if "eval/miou" in entry][-1], seconds


def plain(data: Path, options: list[str]) -> None:
    """A loop of plain PyTorch in this process, one of `RANKS`. Rank 0 prints its result as JSON."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    from lockstep.configs import config_file, registry

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = config_file.load("segmentation", [f"data.train={data}", *COMMON, *options])
    task: Any = registry.build_task(config.task, config.data.train, None)
    samples, epochs, size = task.train_data(), config.train.epochs, config.batch.global_
    torch.manual_seed(0)
    model = task.model().to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.003, weight_decay=0.01)
    per_epoch = -(-len(samples) // size)
    steps = epochs * per_epoch
    warmup = max(1, round(0.1 * steps))
    weights = task._weights.tensor
    began = time.perf_counter()
    for step in range(steps):
        epoch, within = divmod(step, per_epoch)
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(epoch)).tolist()
        mine = order[within * size : (within + 1) * size][rank::RANKS]
        torch.manual_seed(step * RANKS + rank)
        batch = task.collate([task.prepare(samples[index], epoch, True) for index in mine])
        share = (
            (step + 1) / warmup if step < warmup else 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (steps - warmup))
        )
        for group in optimizer.param_groups:
            group["lr"] = 0.003 * share
        images = (batch["images"].float() / 255 - 0.45) / 0.225
        with torch.autocast("cpu", torch.bfloat16):
            logits = ddp(images)
        logits = functional.interpolate(logits.float(), size=images.shape[-2:], mode="bilinear")
        loss = functional.cross_entropy(logits, batch["masks"].long(), weights, ignore_index=-1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
    seconds = time.perf_counter() - began
    if rank == 0:
        print(json.dumps({"miou": plain_miou(task, model.eval()), "seconds": seconds}))
    dist.destroy_process_group()


def plain_miou(task: Any, model: Any) -> float:
    """The mean IoU at the original resolution, counted image by image."""
    import torch
    from torch.nn import functional

    count = len(task.classes)
    matrix = torch.zeros(count, count, dtype=torch.float64)
    data = task.eval_data()
    for index in range(len(data)):
        item = task.prepare(data[index], 0, False)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model((item["images"][None].float() / 255 - 0.45) / 0.225).float()
        told = functional.interpolate(logits, size=item["masks"].shape, mode="bilinear")[0].argmax(0)
        valid = item["masks"] >= 0
        for true in range(count):
            matrix[true] += torch.bincount(told[valid & (item["masks"] == true)], minlength=count)
    iou = matrix.diagonal() / (matrix.sum(0) + matrix.sum(1) - matrix.diagonal())
    return float(iou[~iou.isnan()].mean())


def run_plain(data: Path, name: str, epochs: int | None) -> dict[str, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    arguments = ["--only", name, "--data", str(data), "--plain-rank"]
    arguments += ["--epochs", str(epochs)] if epochs else []
    done = subprocess.run(
        [*command, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@contextlib.contextmanager
def folder_for(keep: Path | None, name: str) -> Iterator[Path]:
    """The folder for the run: a temporary folder, or a folder in `keep`."""
    if keep is not None:
        yield keep / name
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "run"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(OPTIONS))
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--plain", action="store_true", help="also train in a loop of plain PyTorch")
    parser.add_argument("--keep", type=Path, help="keep the run directories in this folder")
    parser.add_argument("--plain-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, help="epochs, with one evaluation at the end; default: the benchmark's")
    parser.add_argument("--rounds", type=int, default=1, help="how often to repeat all trainings, in turn")
    arguments = parser.parse_args()
    if arguments.epochs:
        own = [f"train.epochs={arguments.epochs}", f"train.eval_every_epochs={arguments.epochs}"]
        for options in OPTIONS.values():
            options += own
    if arguments.plain_rank:
        plain(arguments.data / "segmentation" / arguments.only, OPTIONS[arguments.only])
        return
    for number in range(arguments.rounds):
        compare(arguments, number)


def compare(arguments: argparse.Namespace, number: int) -> None:
    """Train on each data set, and print the results."""
    for name in [arguments.only] if arguments.only else OPTIONS:
        data = arguments.data / "segmentation" / name
        if not data.is_dir():
            print(f"{data} does not exist: skipped")
            continue
        place = folder_for(arguments.keep, f"{name}-{number}" if arguments.rounds > 1 else name)
        with CpuSeconds() as cpu, place as run:
            results, seconds = train(data, OPTIONS[name], run)
            speeds = [entry["train/samples_per_s"] for entry in entries_of(run) if "train/samples_per_s" in entry]
        classes = ", ".join(f"{key[9:]} {value:.3f}" for key, value in results.items() if key.startswith("eval/iou/"))
        print(
            f"{name}: mIoU {results['eval/miou']:.4f} (wanted {WANTED[name]}), boundary F1 "
            f"{results['eval/boundary_f1']:.4f}, pixel accuracy {results['eval/pixel_accuracy']:.4f}, {seconds:.0f} s, "
            f"{cpu.total:.1f} s of CPU, {sum(speeds) / max(1, len(speeds)):.1f} samples/s\n  {classes}",
            flush=True,
        )
        if arguments.plain:
            with CpuSeconds() as cpu:
                found = run_plain(arguments.data, name, arguments.epochs)
            print(
                f"{name}, plain PyTorch: mIoU {found['miou']:.4f}, {found['seconds']:.0f} s of training, "
                f"{cpu.total:.1f} s of CPU",
                flush=True,
            )


if __name__ == "__main__":
    main()
