"""BatchNorm in micro-batches that it cannot take as they are: fillers, and single samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn

from lockstep.data.order import StepPlan
from lockstep.distributed.buffers import restore_buffers
from lockstep.distributed.precision import Precision
from lockstep.errors import UsageError


def batch_norms(forward: nn.Module) -> list[nn.Module]:
    """Modules that normalise by the statistics of a batch, and keep running ones."""
    return [module for module in forward.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


@contextlib.contextmanager
def without_trace(forward: nn.Module) -> Generator[None, None, None]:
    """Around the forward and backward pass of a filler, which counts for nothing: no buffer is changed.

    BatchNorm uses its running statistics, because it raises on the single sample of a filler. SyncBatchNorm does not use
    them: there the other ranks wait for the statistics of this rank.
    """
    norms = [norm for norm in batch_norms(forward) if norm.training and not isinstance(norm, nn.SyncBatchNorm)]
    with restore_buffers(forward):
        for norm in norms:
            norm.training = False
        try:
            yield
        finally:
            for norm in norms:
                norm.training = True


def check_smallest_micro_batch(
    forward: nn.Module, plan: StepPlan, read: Callable[[int], Any], precision: Precision
) -> None:
    """Find out before the first step whether BatchNorm can take the plan's smallest micro-batch, where that is one sample.

    Args:
        forward: a `Forward`, in training mode, from `Strategy.inference`. Where it is sharded, all ranks call this.
        read: the batch of one sample, by its index.

    Raises:
        UsageError: it cannot; names the step and the remedy.
    """
    size, step = plan.smallest_micro_batch()
    if size > 1 or not any(norm.training for norm in batch_norms(forward)):
        return
    try:
        with restore_buffers(forward), torch.no_grad(), precision.autocast():
            forward(read(int(plan.indices(step)[0][0])))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        whole, which = (
            plan.samples(step) == plan.global_batch,
            "each step" if not step else f"step {step + 1} of each epoch",
        )
        remedy = (
            "choose a larger batch.micro or batch.global"
            if whole
            else "set data.drop_last=true, or choose another batch.global"
        )
        raise UsageError(
            f"in {which} some rank has a micro-batch of one sample ({plan.samples(step)} samples over {plan.world} ranks), of which BatchNorm has no variance",
            where=f"batch.global={plan.global_batch}",
            remedy=f"{remedy}; or use GroupNorm or LayerNorm, which do not depend on the batch",
        ) from error
