"""Lines on the model and the schedule before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import number_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lockstep.core.schedule import Schedule


def model_summary(
    model: nn.Module, optimizer: Optimizer, *, sharded_over: int | None = None, blocks: Sequence[str] = ()
) -> list[str]:
    """Lines on each parameter group: number of parameters, how many are trained, learning rate, weight decay.

    If learning rates differ, a line has the lowest and the highest.

    Args:
        sharded_over: number of ranks that the parameters are sharded over; None: they are not sharded.
        blocks: names of the modules that are sharded separately.
    """
    lines = [f"{type(model).__name__}: {number_of(_count(model.parameters()), 'parameter')}"]
    for group in optimizer.param_groups:
        total, trained = _count(group["params"]), _count(p for p in group["params"] if p.requires_grad)
        frozen = f", {total - trained:,} frozen" if total > trained else ""
        lines.append(
            f"  group {group['name']}: {trained:,} trainable{frozen}, lr {group['base_lr']:.4g}, "
            f"weight decay {group.get('weight_decay', 0):g}"
        )
    lines += _rates(optimizer)
    if sharded_over is not None:
        names = ", ".join(blocks[:3]) + (f", ..., {blocks[-1]}" if len(blocks) > 3 else "")
        units = (
            f"{number_of(len(blocks), 'block')} separately ({names})"
            if blocks
            else "as a whole: the model has no repeated blocks; see parallel.shard_modules"
        )
        lines.append(f"  sharded over {sharded_over} ranks, {units}")
    return lines


def idle_ranks_warning(global_batch: int, ranks: int) -> list[str]:
    """A warning if a step has fewer samples than ranks. Not an error: training is correct, but some ranks are idle."""
    if global_batch >= ranks:
        return []
    return [
        f"warning: batch.global={global_batch} is less than the {ranks} ranks: a step has no sample for "
        f"{ranks - global_batch} of them; start at most {number_of(global_batch, 'rank')}, or raise batch.global"
    ]


def _count(parameters: Iterable[Any]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _rates(optimizer: Optimizer) -> list[str]:
    """A line that reports different learning rates of parameters, if there are any."""
    trained = [group for group in optimizer.param_groups if any(p.requires_grad for p in group["params"])]
    rates = {group["base_lr"]: group["name"] for group in trained}
    if len(rates) < 2:
        return []
    least, most = min(rates), max(rates)
    ends = f"from {least:.4g} ({rates[least]}) to {most:.4g} ({rates[most]})"
    return [f"  learning rates differ: {len(trained)} groups, {ends}"]


def warm_up_warning(schedule: Schedule, last_step: int, warmup_share: float | None) -> list[str]:
    """A warning if the warm-up lasts for the whole training. Not an error: recipes are often tried for a few steps.

    Args:
        last_step: the step at which training ends.
        warmup_share: `schedule.warmup_share` of the config; None: the config gives steps.
    """
    steps = min(last_step, schedule.length)
    if schedule.warmup < max(steps, 2):
        return []
    key = f"warmup_steps={schedule.warmup}" if warmup_share is None else f"warmup_share={warmup_share}"
    return [
        f"warning: schedule.{key} lasts for the whole training of {number_of(steps, 'step')}: "
        f"the learning rate only rises, to {schedule(steps - 1):.3g} of optim.lr"
    ]
