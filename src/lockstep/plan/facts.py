"""Facts of a task, from its real model on the meta device and from traced passes."""

from __future__ import annotations

from typing import Literal

from lockstep.config import RunConfig
from lockstep.plan.model_facts import ModelFacts
from lockstep.plan.setting import PrecisionName
from lockstep.tasks.task import Task


def facts_of(
    task: Task,
    config: RunConfig,
    *,
    device: Literal["cpu", "cuda"] = "cuda",
    precisions: tuple[PrecisionName, ...] = ("fp32", "bf16"),
    recompute: tuple[bool, ...] = (False, True),
) -> ModelFacts:
    """Make the task's model without memory, and trace its passes.

    Args:
        device: whose operators the trace shall resemble. Nothing is computed on either.
        precisions: whose passes are traced. fp16 has the bytes of bf16.
        recompute: whether activations are recomputed, in the passes that are traced.
    """
    raise NotImplementedError
