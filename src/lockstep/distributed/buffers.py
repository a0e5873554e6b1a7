"""Buffers of a module (such as BatchNorm statistics) that a pass must not change."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import nn


@contextlib.contextmanager
def restore_buffers(module: nn.Module, only_after: type[BaseException] | None = None) -> Generator[None, None, None]:
    """At the end, the buffers of `module` are the tensors that they were before, with the same values.

    Args:
        only_after: restore them only where an exception of this class ends the block. None: restore them in any case.
    """
    places = [(owner._buffers, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]
    values = {id(buffer): (buffer, buffer.clone()) for buffer in module.buffers()}  # modules may share a buffer
    restores = only_after is None
    try:
        yield
    except BaseException as error:
        restores = restores or isinstance(error, only_after or ())
        raise
    finally:
        if restores:
            with torch.no_grad():
                for buffers, name, place in places:
                    if buffers.get(name) is not place:  # code of the model may have put another tensor there
                        buffers[name] = place
                for buffer, value in values.values():
                    buffer.copy_(value)
