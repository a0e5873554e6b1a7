"""The number of terms of a cross-entropy: with outputs that are all zero, n terms of C classes make n log C."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lockstep.core.task import Task
from lockstep_lab.verify.free_outputs import FreeOutputs
from lockstep_lab.verify.reference import data

_ROUNDING = 1e-6
_SINGLE_SAMPLES = 3


def other_units(task: Task, model: nn.Module, samples: Sequence[Any], device: torch.device) -> str:
    """The difference of the units of `Task.weight` from the terms of a cross-entropy; empty: none is known.

    A sum over several labels of each sample is right, so only a ratio that changes from batch to batch is reported.

    Args:
        task: computes in float64.
        samples: prepared training samples.
    """
    half = max(1, len(samples) // 2)
    parts = [samples[:half], samples[half:], *([sample] for sample in samples[:_SINGLE_SAMPLES])]
    outputs = FreeOutputs(model, constant=False)
    counted: dict[str, list[tuple[float, float]]] = {}  # by head: terms of the loss, and units
    classes: set[int] = set()
    sums: dict[str, list[tuple[float, float]]] = {}
    for part in (part for part in parts if part):
        outputs.outputs = nn.ParameterList()  # batches differ in size
        batch = task.collate(list(part))
        with torch.no_grad():
            losses = data.losses(task, outputs, data.to_device(batch, device))
        counts = data.count_units(task, [(batch, len(part))])
        classes |= {size for output in outputs.outputs for size in output.shape if size > 1}
        for head, loss in losses.items():
            sums.setdefault(head, []).append((float(loss), data.units_of(counts, head)))
    for head, pairs in sums.items():
        for size in sorted(classes):
            found = [loss / math.log(size) for loss, _ in pairs]
            if all(abs(count - round(count)) <= _ROUNDING * max(1.0, count) for count in found) and any(found):
                counted.setdefault(head, [(round(count), unit) for count, (_, unit) in zip(found, pairs, strict=True)])
    for head, pairs in counted.items():
        ratios = [terms / units for terms, units in pairs if units]
        if ratios and max(ratios) - min(ratios) > _ROUNDING * max(ratios):
            terms, units = next(pair for pair in pairs if pair[0] != pair[1])
            name = "" if head == "loss" else f" of {head!r}"
            return (
                f"the loss{name} of a batch is a sum over {terms:g} terms, but Task.weight counts {units:g} units, in "
                "a different ratio in other batches. If the loss is a mean over its terms, let the weight count them"
            )
    return ""
