"""BatchNorm: whether a model depends on how batches are split, and micro-batches that BatchNorm cannot normalise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.core import devices
from lockstep.core.data.order import StepPlan
from lockstep.core.errors import UsageError
from lockstep.core.parallel.buffers import restore_buffers, restored_state
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.world import World


@final
class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm of tensors with any number of dimensions, as SyncBatchNorm takes them."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm takes tensors with two or more dimensions, not {input.dim()}")


def without_unsupported(model: nn.Module, world: World) -> tuple[nn.Module, list[str]]:
    """`model` with BatchNorm instead of SyncBatchNorm, if the device of the run cannot run SyncBatchNorm.

    Parameters and buffers are the same objects with the same names.

    Returns:
        the model; and a note for the log, if this makes a difference: on several ranks.
    """
    if devices.of(world.device).has_sync_batch_norm:
        return model, []
    exchanged = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    for module in exchanged:
        module.__class__ = BatchNorm  # type: ignore[assignment]
    if not exchanged or world.size == 1:
        return model, []
    what = f"{len(exchanged)} SyncBatchNorm modules cannot run on this device ({world.device.type})"
    return model, [f"note: {what}: each rank uses the statistics of only its micro-batches"]


def batch_norms(forward: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The BatchNorm modules: they normalise by the statistics of a batch, and keep running statistics."""
    return [module for module in forward.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def by_batch(forward: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The BatchNorm modules that normalise by the statistics of a batch now. Frozen modules keep evaluation mode."""
    return [norm for norm in batch_norms(forward) if norm.training or norm.running_mean is None]


def notes(forward: nn.Module, plan: StepPlan) -> list[str]:
    """A note for the log, if the trained model depends on how BatchNorm's batches are split.

    BatchNorm's batch is a micro-batch. The batch of SyncBatchNorm is a micro-batch of every rank: it is the global
    batch, if no rank has more than one micro-batch in a step.

    Args:
        forward: in training mode.
    """
    norms = by_batch(forward)
    alone = [norm for norm in norms if not isinstance(norm, nn.SyncBatchNorm)]
    parts = max(plan.count(epoch * plan.steps_per_epoch) for epoch in plan.micro_by_epoch or (0,))
    remedy = "Frozen statistics and GroupNorm do not depend on the batch"
    if alone:
        return [
            f"note: {_modules(alone)} each micro-batch with its own statistics: a different batch.micro or number of "
            f"ranks trains a different model. SyncBatchNorm normalises over ranks. {remedy}"
        ]
    if norms and parts > 1:
        return [
            f"note: {_modules(norms)} each of the {parts} parts of a step with its own statistics: a different "
            f"batch.micro or number of ranks trains a different model. {remedy}"
        ]
    return []


def _modules(norms: Sequence[nn.Module]) -> str:
    kind = "SyncBatchNorm" if isinstance(norms[0], nn.SyncBatchNorm) else "BatchNorm"
    return f"1 {kind} module normalises" if len(norms) == 1 else f"{len(norms)} {kind} modules normalise"


@contextlib.contextmanager
def without_trace(forward: nn.Module) -> Generator[None, None, None]:
    """Around the forward and backward pass of a filler: no buffer is changed, because a filler does not count.

    BatchNorm uses its running statistics, because it raises on the single sample of a filler. SyncBatchNorm does not:
    the other ranks wait for the statistics of this rank. Parameters that a forward pass changes do change, because they
    change on the other ranks.
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
    forward: nn.Module, plan: StepPlan, *, read: Callable[[int], Any], precision: Precision
) -> None:
    """Before the first step, check that BatchNorm can normalise the smallest micro-batch of the plan.

    It can, if that micro-batch has two samples or more. A single sample is tried, because it may have many values.

    Args:
        forward: a `Forward`, in training mode, from `Strategy.inference`. If it is sharded, all ranks call this.
        read: returns the batch of one sample, by the sample's index.

    Raises:
        UsageError: BatchNorm cannot normalise a single sample; names the step and the remedy.
    """
    size, step = plan.smallest_micro_batch()
    if size > 1 or not any(norm.training for norm in batch_norms(forward)):
        return
    try:
        with restored_state(forward), torch.no_grad(), precision.autocast():
            forward(read(int(plan.indices(step)[0][0])))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        samples = plan.samples(step)
        epoch, within = divmod(step, plan.steps_per_epoch)
        steps = f"step {within + 1} of each epoch" if within else "each step"
        steps += f" from epoch {epoch + 1} on" if epoch else ""
        remedy = "set data.drop_last=true, or choose another batch.global"
        if samples == plan.global_batch:
            remedy = "choose a larger batch.micro or batch.global"
        raise UsageError(
            f"in {steps} some rank has a micro-batch of one sample ({samples} samples over {plan.world} ranks): "
            "BatchNorm cannot compute a variance from it",
            where=f"batch.global={plan.global_batch}",
            remedy=f"{remedy}; or use GroupNorm or LayerNorm, which do not depend on the batch",
        ) from error
