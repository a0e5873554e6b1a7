"""Time per step of a training on CT volumes whose backbone is frozen, with and without kept features.

    python benchmarks/ct_frozen.py [--data ../shared/data/ct/sts/labels.csv] [--size 224] [--hidden 192] [--layers 6]

Both sides train the same model with the same slices in this process, on one torch thread and without loader workers: a
step prepares and collates its samples, and runs the loss, the backward pass and the optimizer. Their steps take turns.
The volumes are decoded before, and the slices of each sample are the evenly spaced slices, so that the features of all
of them are kept after one epoch. Quoted are the median times, the median of the ratios, and whether the weights of both
sides are bitwise equal at the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 2  # of a step


class Side:
    """One of the two trainings."""

    def __init__(self, arguments: argparse.Namespace, *, keeps: bool) -> None:
        import torch

        from lockstep.tasks.ct.options import VolumeRiskOptions
        from lockstep.tasks.ct.task import VolumeRisk

        sizes = {
            "hidden_size": arguments.hidden,
            "num_hidden_layers": arguments.layers,
            "num_attention_heads": 4,
            "intermediate_size": 4 * arguments.hidden,
            "patch_size": 14,
        }
        options = VolumeRiskOptions.model_validate(
            {
                "scratch": {"architecture": "vit", "sizes": sizes},
                "image_size": arguments.size,
                "train_slices": "even",
                "frozen_epochs": 1_000,
                "keep_features": keeps,
            }
        )
        self.task = VolumeRisk(options, train=str(arguments.data))
        self.data: Any = self.task.train_data()
        torch.manual_seed(0)
        self.model: Any = self.task.model()
        self.model.backbone.requires_grad_(False)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, number: int) -> float:
        """Train on the samples of a step. Returns the seconds."""
        start = time.perf_counter()
        places = [(number * SAMPLES + sample) % len(self.data) for sample in range(SAMPLES)]
        batch = self.task.collate([self.task.prepare(self.data[place], 0, True) for place in places])
        loss: Any = self.task.loss(self.model, batch)[0]
        (loss / max(1.0, float(self.task.weight(batch)))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/ct/sts/labels.csv")
    parser.add_argument("--size", type=int, default=224, help="height and width of slices in pixels")
    parser.add_argument("--hidden", type=int, default=192, help="hidden size of the backbone")
    parser.add_argument("--layers", type=int, default=6, help="layers of the backbone")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each side")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["LOCKSTEP_CACHE"] = cache
        import torch

        torch.set_num_threads(1)
        plain, keeping = Side(arguments, keeps=False), Side(arguments, keeps=True)
        filling = -(-len(plain.data) // SAMPLES)
        first = [(plain.step(number), keeping.step(number)) for number in range(filling)]
        times = [(plain.step(number), keeping.step(number)) for number in range(filling, filling + arguments.steps)]
        weights = keeping.model.state_dict()
        equal = all(torch.equal(value, weights[name]) for name, value in plain.model.state_dict().items())
    print(f"{len(plain.data)} volumes, {filling} steps to fill, {arguments.steps} timed steps of {SAMPLES} samples")
    print(f"filling: {statistics.median(kept / without for without, kept in first):.3f} of the time without")
    without, kept = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(without / kept for without, kept in times)
    print(f"without: {without:.3f} s, kept: {kept:.4f} s, {ratio:.1f} times faster; weights bitwise equal: {equal}")


if __name__ == "__main__":
    main()
