"""Values that a forward pass writes into gathered parameters: FSDP lets go of them, and the values are lost."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lockstep.core.errors import TrainingError, listed
from lockstep.core.parallel import torch_internals
from lockstep.core.parallel.sharded_tensor import is_spread, local

_PART = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Gathered:
    """A gathered parameter before a pass."""

    owner: nn.Module
    key: str
    value: Tensor
    version: int
    memory: int
    bits: Tensor | None

    @property
    def is_there(self) -> bool:
        """False if FSDP has let go of it meanwhile: then it was looked at before."""
        return self.owner._parameters[self.key] is self.value

    def is_written(self) -> bool:
        """True if torch has counted a write since, or other memory was put in place."""
        return (self.value._version, _memory(self.value)) != (self.version, self.memory)


@final
class GatheredWrites:
    """Watches the forward passes of a training for writes into gathered parameters.

    torch counts writes, and `parameter.data = value` puts other memory in place: each pass looks at both, so a write
    that changes no value is seen, too. torch does not count writes through `parameter.data`, such as
    `parameter.data.lerp_(...)`. They are known by a sum of the bits, which reads all memory: the passes of steps 1, 2,
    4, 8, ... of a process take it. The host reads the sums of step 1 at once, and later ones before a save or an
    evaluation, so that no step waits for the device.

    Args:
        root: the module that is sharded last.
        sharded: all modules that gather parameters, with `root`.
    """

    def __init__(self, root: nn.Module, sharded: Sequence[Any]) -> None:
        self.root, self.found = root, dict[str, None]()
        self._step, self._next_sums = 1, 1
        self._names = {id(module): name for name, module in root.named_modules()}
        self._places = {
            id(module): [(owner, key) for owner, key, _ in torch_internals.sharded_places(module)] for module in sharded
        }
        self._gathered: dict[int, list[_Gathered]] = {}
        self._differ: list[tuple[str, Tensor]] = []  # whether sums differ, which the host has not read
        for module in sharded:
            module.register_forward_pre_hook(self._begin)  # after FSDP has gathered
            module.register_forward_hook(self._end, prepend=True)

    def _begin(self, module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            takes_sums = self._step == self._next_sums
            self._gathered[id(module)] = [
                _Gathered(owner, key, value, value._version, _memory(value), _sum_of(value) if takes_sums else None)
                for owner, key in self._places[id(module)]
                if (value := owner._parameters[key]) is not None and not is_spread(value)
            ]

    def _end(self, module: nn.Module, *_: Any) -> None:
        of_all = [id(module)] if module is not self.root else list(self._gathered)  # a block may stay gathered
        for one in of_all:
            for gathered in filter(operator.attrgetter("is_there"), self._gathered.get(one, ())):
                name = f"{self._names[id(gathered.owner)]}.{gathered.key}".removeprefix("model.")
                if gathered.is_written():
                    self.found[name] = None
                elif gathered.bits is not None:
                    self._differ.append((name, _sum_of(gathered.value) != gathered.bits))
        if module is self.root:
            self._gathered.clear()

    def check(self, last: bool) -> None:
        """After the forward pass of a micro-batch.

        Args:
            last: whether it is the last of a step.

        Raises:
            TrainingError: it wrote into gathered parameters; names them.
        """
        if self._step == 1:
            self.read_sums()
        self._raise_if_found()
        if last:
            self._next_sums *= 2 if self._step == self._next_sums else 1
            self._step += 1

    def read_sums(self) -> None:
        """Read the sums of the bits that the host has not read. It waits for the device.

        Raises:
            TrainingError: see `check`.
        """
        differ, self._differ = self._differ, []
        self.found |= {name: None for name, differs in differ if bool(differs)}
        self._raise_if_found()

    def _raise_if_found(self) -> None:
        if self.found:
            raise TrainingError(
                "a forward pass writes into parameters, and fsdp loses what it writes: each rank keeps its rows of the "
                f"parameters as they were before the pass. These parameters are written: {listed(list(self.found))}",
                where="Task.model or Task.loss",
                remedy="use parallel.strategy=ddp, or keep what the pass writes in buffers (register_buffer), such as "
                "the weights of a momentum encoder",
            )


def _memory(value: Tensor) -> int:
    return local(value).untyped_storage().data_ptr()


def _sum_of(parameter: Tensor) -> Tensor:
    """The sum of the bits as integers: a scalar on the device of the parameter."""
    values = local(parameter.detach())
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.untyped_storage().size():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    bits = values.contiguous().flatten().view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in torch.split(bits, _PART):  # torch sums integers in a copy of 64 bits each
        total += part.sum(dtype=torch.int64)
    return total
