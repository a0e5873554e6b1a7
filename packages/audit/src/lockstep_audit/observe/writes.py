"""Observes what writes to parameters of a DDP model after its wrapping, apart from optimizers."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from lockstep_audit.observe import digests, places
from lockstep_audit.observe.recorder import After, recorder

NAMES = (
    *("copy_", "fill_", "zero_", "normal_", "uniform_", "add_", "sub_", "mul_", "div_", "lerp_"),
    *("__setitem__", "__iadd__"),
)
_EACH = 24
"""The number of writes of each line that are recorded."""
_KINDS = (torch.Tensor, torch.nn.Parameter)
_memory: dict[int, tuple[weakref.ref[Any], str]] = {}
"""The model and the name of the parameter at an address."""
_lines: Counter[tuple[int, int]] = Counter()


def watch(inner: Any, parameters: Mapping[str, torch.Tensor]) -> None:
    """Record writes to these parameters of a model from now on."""
    found = {_address(parameter): name for name, parameter in parameters.items()}
    _memory.update({address: (weakref.ref(inner), name) for address, name in found.items() if address})


def _address(tensor: Any) -> int:
    """Where the memory of a tensor begins. 0: it has no memory."""
    if type(tensor) not in _KINDS:
        return 0
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError:  # within torch.func
        return 0


def _parameter(inner: Any, name: str) -> Any:
    """A parameter of a model, if it still exists."""
    try:
        return inner.get_parameter(name)
    except AttributeError:
        return None


def written(tensor: Any, *_: Any, **__: Any) -> After:
    """Tensor.copy_ and the like, outside optimizers. A parameter's `data` shares the parameter's memory."""
    known = _memory.get(_address(tensor)) if _memory else None
    frame = places.user_frame(sys._getframe(3)) if known is not None else None
    if known is None or frame is None:
        return None
    inner, name = known[0](), known[1]
    line = id(frame.f_code), frame.f_lineno
    _lines[line] += 1
    if _lines[line] > _EACH or inner is None or _address(_parameter(inner, name)) != _address(tensor):
        return None
    at = places.here(frame)

    def after(result: Any, error: BaseException | None) -> None:
        if error is None:
            recorder.emit("write", at=at, name=name, digest=digests.of_tensors({"": tensor.detach()})[""])

    return after
