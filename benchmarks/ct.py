"""Time and memory per step of a training on CT volumes of mixed lengths, against two usual ways to batch volumes.

    python benchmarks/ct.py [--data ../shared/data/ct/sts/labels.csv] [--size 112] [--batch 6] [--slices 128]

The sides have the same weights and the same slices, and compute the same gradient:

- `concatenated`: Lockstep's batch. The slices of all volumes pass through the backbone one after another.
- `chunks`: the same, with `slices_per_chunk`, so that most activations are computed again in the backward pass.
- `micro=1`: Lockstep with micro-batches of one volume, without padding.
- `padded`: every volume is filled up with slices of zeros to the longest volume of the batch, and the backbone sees
  all of them.
- `one by one`: a volume at a time, filled up to `--slices`, with accumulated gradients.

A step is the forward and the backward pass of a batch that is in memory, in this process, on one torch thread. The
sides take turns, and every round has another batch. Quoted are the median CPU times, which other processes change less
than the times of the clock, and the median of the ratios to `concatenated`. Two columns are about memory: the
activations that the backward pass keeps (the largest sum of the bytes of different tensors that autograd has saved),
and by how much the first step raises the peak of the resident memory of a process of its own. The last column is the
largest relative difference of the gradients.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]


class Sides:
    """A model and the ways to compute the gradient of its loss for a batch."""

    def __init__(self, arguments: argparse.Namespace) -> None:
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
                "max_slices": arguments.slices,
                "train_slices": "even",
                "augment": None,
            }
        )
        self.task = VolumeRisk(options, train=str(arguments.data))
        torch.manual_seed(0)
        self.model: Any = self.task.model().train()
        self.longest, self.chunk = arguments.slices, arguments.chunk

    def batch(self, indices: list[int]) -> dict[str, Any]:
        data: Any = self.task.train_data()
        return self.task.collate([self.task.prepare(data[index], 0, True) for index in indices])

    def concatenated(self, batch: dict[str, Any]) -> None:
        self._backward(self.task.loss(self.model, batch)[0], batch)

    def chunks(self, batch: dict[str, Any]) -> None:
        self.model.slices_per_chunk = self.chunk
        try:
            self.concatenated(batch)
        finally:
            self.model.slices_per_chunk = None

    def padded(self, batch: dict[str, Any]) -> None:
        self._backward(self._padded_loss(batch, batch["longest"]), batch)

    def one_by_one(self, batch: dict[str, Any]) -> None:
        for single in self._singles(batch):
            self._backward(self._padded_loss(single, self.longest), batch)

    def micro_batches_of_one(self, batch: dict[str, Any]) -> None:
        for single in self._singles(batch):
            self._backward(self.task.loss(self.model, single)[0], batch)

    def _singles(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The volumes of a batch, each as a batch of its own."""
        counts = batch["counts"].tolist()
        slices, positions = batch["slices"].split(counts), batch["positions"].split(counts)
        for place, count in enumerate(counts):
            yield {
                "slices": slices[place],
                "positions": positions[place],
                "counts": torch.tensor([count]),
                "longest": count,
                "labels": batch["labels"][place : place + 1],
            }

    def _padded_loss(self, batch: dict[str, Any], length: int) -> Tensor:
        from lockstep.tasks.ct.losses import answer_loss

        counts = batch["counts"]
        is_slice = torch.arange(length) < counts[:, None]
        slices = batch["slices"].new_zeros(len(counts), length, *batch["slices"].shape[1:])
        slices[is_slice] = batch["slices"]
        features = self.model.slice_features({"slices": slices.flatten(0, 1)})[is_slice.flatten()]
        logits = self.model(batch, features).logits
        return answer_loss(logits, batch["labels"], reduction="question")

    def _backward(self, loss: Any, batch: dict[str, Any]) -> None:
        (loss / self.task.weight(batch)).backward()

    def gradient(self) -> Tensor:
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])


class Saved:
    """The largest sum of bytes of tensors that autograd keeps for backward passes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.most, self._now = 0, 0
        self._counts: dict[int, int] = {parameter.data_ptr(): 1 for parameter in model.parameters()}

    def pack(self, tensor: Tensor) -> Any:
        return _Held(self, tensor)

    def add(self, tensor: Tensor) -> int:
        place = tensor.untyped_storage().data_ptr()
        self._counts[place] = self._counts.get(place, 0) + 1
        if self._counts[place] == 1:
            self._now += tensor.untyped_storage().nbytes()
            self.most = max(self.most, self._now)
        return place

    def remove(self, place: int, size: int) -> None:
        self._counts[place] -= 1
        if not self._counts[place]:
            self._now -= size


class _Held:
    """A saved tensor, which is counted until autograd lets go of it."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor, self.size = saved, tensor, tensor.untyped_storage().nbytes()
        self.place = saved.add(tensor)

    def __del__(self) -> None:
        self.saved.remove(self.place, self.size)


def kept_mib(side: Any, batch: dict[str, Any], model: torch.nn.Module) -> float:
    saved = Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
        side(batch)
    return saved.most / 2**20


def resident_mib(side: Any, batch: dict[str, Any]) -> float:
    """By how much a step raises the peak of the resident memory of a new process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        side(batch)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writing, str(more / 2**10).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        return float(answer.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/ct/sts/labels.csv")
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--slices", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sides = Sides(arguments)
    ways = {
        "concatenated": sides.concatenated,
        "chunks": sides.chunks,
        "micro=1": sides.micro_batches_of_one,
        "padded": sides.padded,
        "one by one": sides.one_by_one,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    kept: dict[str, float] = {}
    resident: dict[str, float] = {}
    differences = dict.fromkeys(ways, 0.0)
    length = len(sides.task.train_data())  # type: ignore[arg-type]
    for step in range(arguments.steps + 1):
        order = torch.randperm(length, generator=torch.Generator().manual_seed(step))
        batch = sides.batch(order[: arguments.batch].tolist())
        expected = None
        if step == 0:  # before anything else has used memory
            resident = {name: resident_mib(side, batch) for name, side in ways.items()}
        for name, side in ways.items():
            sides.model.zero_grad(set_to_none=True)
            if step == 0:  # warms up, too
                kept[name] = kept_mib(side, batch, sides.model)
                continue
            begun = time.process_time()
            side(batch)
            times[name].append(time.process_time() - begun)
            gradient = sides.gradient()
            expected = gradient if expected is None else expected
            differences[name] = max(differences[name], float((gradient - expected).norm() / expected.norm()))
        if step:
            counts = batch["counts"].tolist()
            print(f"step {step}: volumes of {counts} slices", flush=True)
    print(f"{'':14}{'CPU s':>10}{'ratio':>8}{'kept MiB':>10}{'resident':>10}{'difference':>12}")
    for name in ways:
        ratio = statistics.median(a / b for a, b in zip(times[name], times["concatenated"], strict=True))
        middle = statistics.median(times[name])
        memory = f"{kept[name]:10.0f}{resident[name]:10.0f}"
        print(f"{name:14}{middle:10.2f}{ratio:8.2f}{memory}{differences[name]:12.1e}")


if __name__ == "__main__":
    main()
