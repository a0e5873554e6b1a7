"""Buffers of a module (such as BatchNorm statistics) that a pass must not change."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_Places = list[tuple[dict[str, Tensor | None], str, Tensor | None]]  # where each buffer is, its name, the buffer


@contextlib.contextmanager
def restore_buffers(module: nn.Module) -> Generator[None, None, None]:
    """At the end, the buffers of `module` are the tensors that they were before, with the same values."""
    places = _places(module)
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]  # modules may share a buffer
    try:
        yield
    finally:
        _restore(places, values)


class BuffersCannotBeRestored(Exception):
    """A pass changed a buffer of which there is no copy."""


class ChangingBuffers:
    """Puts the buffers of a module back after a step that was given up. It copies only buffers that steps change.

    Many buffers are constants: masks, tables of positions, class weights. The first step copies all buffers. Later
    steps copy the statistics of modules that normalise, because their kernels change buffers without a trace, and
    buffers that an earlier forward pass changed: torch counts the changes of each tensor.

    Args:
        module: its forward passes are watched.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._known: set[int] = set()  # identities of buffers
        self._changing: set[int] = set()

    @contextlib.contextmanager
    def restored_after(self, failure: type[BaseException]) -> Generator[None, None, None]:
        """Where an exception of the class `failure` ends the block, the buffers are as they were before.

        Raises:
            BuffersCannotBeRestored: instead of `failure`, where a buffer has changed that no step changed before.
        """
        places, buffers = _places(self.module), list(self.module.buffers())
        norms = {id(b) for owner in self.module.modules() if isinstance(owner, _NormBase) for b in owner.buffers(False)}
        always = self._changing | norms
        values = [(b, b.clone()) for b in buffers if id(b) in always or id(b) not in self._known]
        versions: dict[int, int] = {}

        def begin(*_: object) -> None:
            versions.update((id(buffer), buffer._version) for buffer in buffers)

        def end(*_: object) -> None:
            self._changing |= {id(buffer) for buffer in buffers if buffer._version != versions.get(id(buffer))}

        begin()  # memory may not suffice before the first forward pass
        hooks = [self.module.register_forward_pre_hook(begin), self.module.register_forward_hook(end)]
        try:
            yield
        except BaseException as error:
            if isinstance(error, failure):
                end()
                if (self._changing & {id(buffer) for buffer in buffers}) - {id(buffer) for buffer, _ in values}:
                    raise BuffersCannotBeRestored from error
                _restore(places, values)
            raise
        finally:
            for hook in hooks:
                hook.remove()
        self._known = {id(buffer) for buffer in buffers}


def _places(module: nn.Module) -> _Places:
    return [(owner._buffers, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]


def _restore(places: _Places, values: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffers, name, place in places:
            if buffers.get(name) is not place:  # code of the model may have put another tensor there
                buffers[name] = place
        for buffer, value in values:
            buffer.data.copy_(value)  # `data`: torch does not count it as a change, see `ChangingBuffers`
