"""How much of an update is lost because the weights have 16 bits: measured in the first update of a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.build import Run
from lockstep.core.optimizer_class import like, members, options
from lockstep.core.parallel.sharded_tensor import local

NARROW = (torch.bfloat16, torch.float16)
REMEDY = (
    "load or make the model in float32 (transformers: from_pretrained(..., dtype=torch.float32)) and set "
    "precision=bf16: passes then compute in bf16, and updates are not rounded away"
)
_ELEMENTS = 1 << 20  # that are looked at, over all parameters


class LostUpdates:
    """Repeats the first update of some rows of each 16-bit parameter, in its format and in float32.

    Both repetitions are made by new optimizers with the first gradients, at the peak of the learning rate: a warm-up
    begins with smaller ones, which lose more.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.counts = torch.zeros(3, dtype=torch.int64)  # gradients that are not zero; weights that stay: here, float32
        self.weights, self.formats, self.rate = 0, set[str](), 0.0
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Look at the next update, on rank 0."""
        run = self.run
        narrow = [one for one in run.model.parameters() if one.requires_grad and one.dtype in NARROW]
        self.weights = sum(one.numel() for one in narrow)
        self.formats = {str(one.dtype).removeprefix("torch.") for one in narrow}
        if narrow and run.world.rank == 0:
            self._handles = [
                one.register_step_pre_hook(lambda optimizer, *_: self._measure(optimizer, _ELEMENTS // len(narrow)))
                for one in members(run.state.optimizer)
            ]

    def warnings(self) -> list[str]:
        """A warning, if weights have 16 bits. Nothing is looked at any longer."""
        for handle in self._handles:
            handle.remove()
        if not self._handles:
            return []
        total, lost, in_float32 = self.counts.tolist()
        share = "its updates were not measured"
        if total:
            share = (
                f"at the learning rate {self.rate:g}, rounding loses {lost / total:.1%} of their updates "
                f"({in_float32 / total:.1%} in float32)"
            )
        of = " and ".join(sorted(self.formats))
        return [f"warning: {self.weights:,} trainable weights are {of}: {share}\n  remedy: {REMEDY}"]

    def _measure(self, optimizer: torch.optim.Optimizer, most: int) -> None:
        for group in optimizer.param_groups:
            for values, gradient in _rows(group["params"], most):
                moved = [_moved(optimizer, group, values.to(of), gradient.to(of)) for of in (values.dtype, torch.float)]
                if moved[0] is None or moved[1] is None:  # such an optimizer cannot be made again
                    continue
                has_gradient = gradient != 0
                self.rate = max(self.rate, float(group["base_lr"]))
                self.counts += torch.stack(
                    [has_gradient.sum(), *((has_gradient & ~one).sum() for one in moved if one is not None)]
                ).cpu()


def _rows(parameters: list[Tensor], most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of 16-bit parameters with their gradients."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.dtype in NARROW:
            values, gradient = local(parameter).detach(), local(parameter.grad).detach()
            if values.numel():
                rows = slice(max(1, most * len(values) // values.numel())) if values.ndim else ...
                yield values[rows], gradient[rows]


def _moved(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], values: Tensor, gradient: Tensor
) -> Tensor | None:
    """Which values the first update of an optimizer of this class changes; None: it cannot be made."""
    parameter = nn.Parameter(values.clone())
    try:
        made = like(optimizer, [parameter], options(optimizer))
        if made is None:
            return None
        own = made.param_groups[0]
        own |= {key: group[key] for key in own if key != "params" and key in group} | {"lr": float(group["base_lr"])}
        parameter.grad = gradient.clone()
        made.step()
    except (TypeError, ValueError, AssertionError, RuntimeError):
        return None
    return parameter.detach() != values
