"""Average precision and time of detection from scratch on blood cells, and memory of gathering detections.

    python benchmarks/detection.py [--epochs 180] [--seed 0] [--data ../shared/data] [--keep RUN_DIR]
    python benchmarks/detection.py --plain [--epochs 180]     the same model and number of samples in a plain loop
    python benchmarks/detection.py --compare [--epochs 5] [--rounds 3]     both in turn, each on one thread
    python benchmarks/detection.py --gather                   5,000 images with 300 boxes each, on two ranks

The training is `lockstep train detection` on two ranks with one torch thread each, in bf16. The results are the last
evaluation (20 images, 243 boxes) and the seconds of the whole command. The plain loop is one process; it prepares
images in the same way, and has no checkpoints, logs and moving average.

`--compare` trains in one process with one torch thread and no loader workers, without moving average, with the recipe
and in the plain loop, and evaluates once. The results are the CPU seconds of the process, without imports.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import spread

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ["precision=bf16", "task.augment.vertical_flip=0.5"]
WANTED = {"mAP": 0.55, "mAP50": 0.88}
PICTURES, BOXES, CLASSES, MICRO = 5000, 300, 80, 8


def train(data: Path, epochs: int, seed: int, keep: Path | None) -> None:
    """Train with the recipe, and print the results."""
    command = [sys.executable, "-m", "lockstep", "train", "detection", "--nproc", "2"]
    with tempfile.TemporaryDirectory() as folder:
        run = keep or Path(folder, "run")
        arguments = [f"data.train={data}", *OPTIONS, f"train.epochs={epochs}", f"seed={seed}", "--run-dir", str(run)]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        seconds = time.perf_counter() - began
        if done.returncode:
            sys.exit(done.stderr)
        entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [entry for entry in entries if "eval/mAP" in entry][-1]
    values = {name.removeprefix("eval/"): value for name, value in last.items() if name.startswith("eval/mAP")}
    listed = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
    print(f"lockstep: {listed}; wanted {WANTED}; {epochs} epochs in {seconds:.0f} s")


def fit(data: Path, epochs: int, seed: int) -> dict[str, float]:
    """Train with the recipe in this process, without moving average."""
    from lockstep.configs.config_file import load
    from lockstep.trainer.trainer import Trainer

    own = [f"train.epochs={epochs}", f"train.eval_every_epochs={epochs}", "train.ema_decay=null", "data.workers=0"]
    config = load("detection", [f"data.train={data}", *OPTIONS, *own, f"seed={seed}", "device=cpu"])
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        found = Trainer(config, run_dir=Path(folder, "run"), quiet=True).fit()
    return {"mAP": found["eval/mAP"], "mAP50": found["eval/mAP50"], "cpu_s": time.process_time() - began}


def plain(data: Path, epochs: int, seed: int) -> dict[str, float]:
    """The same model and the same number of samples in a loop of plain PyTorch."""
    import torch

    from lockstep.configs.config_file import load
    from lockstep.configs.registry import build_task
    from lockstep.core.data.loader import map_tensors

    torch.manual_seed(seed)
    config = load("detection", [f"data.train={data}", *OPTIONS])
    task: Any = build_task(config.task, str(data), None)
    began, cpu = time.perf_counter(), time.process_time()
    model = task.model().to(memory_format=torch.channels_last)
    samples, batch_size = task.train_data(), config.batch.global_
    steps = epochs * math.ceil(len(samples) / batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, weight_decay=config.optim.weight_decay)
    warmup = round(0.05 * steps)
    rates = [min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
    step = 0
    for epoch in range(epochs):
        order = torch.randperm(len(samples)).tolist()
        for begin in range(0, len(order), batch_size):
            batch = task.collate([task.prepare(samples[i], epoch, True) for i in order[begin : begin + batch_size]])
            units = task.weight(batch)
            with torch.autocast("cpu", torch.bfloat16):
                losses = task.loss(model, batch)
            heads = {head: losses[head] / units[head].clamp(min=1) for head in losses}
            sum(task.coefficients.get(head, 1.0) * value for head, value in heads.items()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = config.optim.lr * rates[step]
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    seconds = time.perf_counter() - began
    model.eval()
    presenter, held_out, rows = task.presenter(task), task.eval_data(), []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for index in range(len(held_out)):
            output = task.predict(model, task.collate([task.prepare(held_out[index], 0, False)]))
            rows += presenter.rows(held_out[index], map_tensors(output, lambda part: part[0]))
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = held_out.ground_truth()
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(rows), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    cpu = time.process_time() - cpu
    print(f"plain: mAP {evaluation.stats[0]:.3f}, mAP50 {evaluation.stats[1]:.3f}; {epochs} epochs in {seconds:.0f} s")
    return {"mAP": float(evaluation.stats[0]), "mAP50": float(evaluation.stats[1]), "cpu_s": cpu}


def compare(data: Path, epochs: int, rounds: int) -> None:
    """Both variants in turn, in this process on one thread."""
    import torch

    torch.set_num_threads(1)
    ratios = []
    for number in range(-1, rounds):
        if number < 0:  # imports and compilation at the first use
            fit(data, 1, 0)
            continue
        lockstep, loop = fit(data, epochs, number), plain(data, epochs, number)
        ratios.append(lockstep["cpu_s"] / loop["cpu_s"])
        listed = "; ".join(
            f"{name}: mAP {found['mAP']:.3f}, mAP50 {found['mAP50']:.3f}, {found['cpu_s']:.1f} s of CPU"
            for name, found in (("lockstep", lockstep), ("plain", loop))
        )
        print(f"round {number + 1}: {listed}; ratio {ratios[-1]:.2f}", flush=True)
    print(f"ratio {spread(ratios)}")


def gather_on_rank() -> None:
    """On each rank that torchrun started: fill the metric with random detections, and gather them."""
    import torch
    from torchmetrics import MetricCollection

    from lockstep.core import metric_sync
    from lockstep.core.parallel.world import join_world
    from lockstep_recipes.tasks.vision.detection.coco_map import CocoMap

    class GatheredOnly(CocoMap):
        """pycocotools is not called: this measures the gathering."""

        def compute(self) -> dict[str, torch.Tensor]:
            rows = sum(len(part) for part in self.boxes)
            return {"boxes_gathered": torch.tensor(rows)}

    with join_world("cpu") as world:
        metrics = MetricCollection([GatheredOnly(lambda: None, [str(n) for n in range(CLASSES)])])  # type: ignore[arg-type, return-value]
        mine = range(world.rank * PICTURES // world.size, (world.rank + 1) * PICTURES // world.size)
        for begin in range(0, len(mine), MICRO):
            ids = torch.tensor(mine[begin : begin + MICRO])
            shape = (len(ids), BOXES)
            metrics.update(torch.rand(*shape, 4) * 640, torch.rand(shape), torch.randint(0, CLASSES, shape), ids)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        before = _memory("VmRSS")
        values, _ = metric_sync.compute(metrics, world)
        if world.rank == 0:
            peak, after = _memory("VmHWM"), _memory("VmRSS")
            count = int(values["boxes_gathered"])
            print(f"gathered {count:,} boxes: rank 0 had {before:.0f} MB, then {after:.0f} MB, at most {peak:.0f} MB")
            print(f"so gathering took at most {peak - before:.0f} MB (wanted: 200 MB)")


def _memory(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--epochs", type=int, default=180)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the run directory here")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--gather", action="store_true")
    parser.add_argument("--compare", action="store_true", help="run the recipe and the plain loop in turn")
    parser.add_argument("--rounds", type=int, default=3, help="of --compare")
    arguments = parser.parse_args()
    if arguments.gather:
        if "RANK" in os.environ:
            gather_on_rank()
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, "--gather"]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return
    data = arguments.data / "detection" / "bccd"
    if not data.is_dir():
        sys.exit(f"no {data}")
    if arguments.compare:
        compare(data, arguments.epochs, arguments.rounds)
    elif arguments.plain:
        plain(data, arguments.epochs, arguments.seed)
    else:
        train(data, arguments.epochs, arguments.seed, arguments.keep)


if __name__ == "__main__":
    main()
