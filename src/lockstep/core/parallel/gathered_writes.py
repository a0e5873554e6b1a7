"""Values that a forward pass writes into gathered parameters: FSDP lets go of them, and the values are lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import TrainingError, listed
from lockstep.core.parallel import torch_internals
from lockstep.core.parallel.sharded_tensor import is_sharded

_PART = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GatheredWrites:
    """Watches forward passes in training for writes into gathered parameters, until `check`.

    A sum of the bits of each parameter is taken when it is gathered, and before it is let go of. torch counts writes,
    but not those through `parameter.data`.

    Args:
        root: the module that is sharded last.
        sharded: all modules that gather parameters, with `root`.
    """

    def __init__(self, root: nn.Module, sharded: Sequence[Any]) -> None:
        self.root, self.found = root, dict[str, None]()
        self._names = {id(module): name for name, module in root.named_modules()}
        self._sums: dict[int, list[tuple[nn.Module, str, nn.Parameter, int]]] = {}
        self._hooks = [module.register_forward_pre_hook(self._begin) for module in sharded]  # after FSDP has gathered
        self._hooks += [module.register_forward_hook(self._end, prepend=True) for module in sharded]

    def _begin(self, module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            found = self._sums[id(module)] = []
            for owner, key, _ in torch_internals.sharded_places(module):
                value = owner._parameters[key]
                if value is not None and not is_sharded(value):
                    found.append((owner, key, value, _sum_of(value)))

    def _end(self, module: nn.Module, *_: Any) -> None:
        of_all = [id(module)] if module is not self.root else list(self._sums)  # a block may stay gathered
        for one in of_all:
            for owner, key, value, before in self._sums.get(one, ()):
                if owner._parameters[key] is value and _sum_of(value) != before:
                    self.found[f"{self._names[id(owner)]}.{key}".removeprefix("model.")] = None
        if module is self.root:
            self._sums.clear()

    def check(self) -> None:
        """Stop watching.

        Raises:
            TrainingError: a forward pass wrote into gathered parameters; names them.
        """
        for hook in self._hooks:
            hook.remove()
        self._sums.clear()
        if self.found:
            raise TrainingError(
                "a forward pass writes into parameters, and fsdp loses what it writes: each rank keeps its rows of the "
                f"parameters as they were before the pass. These parameters are written: {listed(list(self.found))}",
                where="Task.model or Task.loss",
                remedy="use parallel.strategy=ddp, or keep what the pass writes in buffers (register_buffer), such as "
                "the weights of a momentum encoder",
            )


def _sum_of(parameter: Tensor) -> int:
    values = parameter.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.untyped_storage().size():
        return 0
    bits = values.contiguous().flatten().view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in torch.split(bits, _PART):  # torch sums integers in a copy of 64 bits each
        total += part.sum(dtype=torch.int64)
    return int(total)
