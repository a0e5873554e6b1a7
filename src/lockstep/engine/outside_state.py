"""State that no checkpoint holds: what a training changes in a model, but outside of its `state_dict`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Modules and tasks of these packages were read: what they keep in attributes are settings and caches.
_KNOWN = ("torch", "transformers", "peft", "lockstep")
_OF_TORCH = frozenset(vars(nn.Module()))
_SHOWN = 5


class OutsideState:
    """Looks at a model and its task three times: before the first step of a process, after it and after the second.

    A buffer that is not saved is named if it has changed at all. A number or tensor in an attribute is named if it
    changed in the second step, because many models note the size of their first batch; a flag, if it has changed.

    Args:
        task: whose attributes are looked at, too.
    """

    def __init__(self, model: nn.Module, task: object) -> None:
        self.model, self.task = model, task
        self.seen: list[dict[str, tuple[str, object]]] = []

    def look(self) -> None:
        """Remember the values as they are now."""
        self.seen.append({name: (kind, value) for name, kind, value in self._values()})

    def warnings(self) -> list[str]:
        """A warning, where state changed that no checkpoint holds."""
        before, first, second = self.seen
        found = []
        for name, (kind, value) in second.items():
            since = first if kind in ("int", "float", "tensor") else before
            if name in since and since[name][0] == kind and since[name][1] != value:
                found.append(f"{name} ({kind})")
        if not found:
            return []
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return [
            f"warning: training changes {', '.join(found[:_SHOWN])}{more}, and no checkpoint holds that: a resumed run "
            "begins with the first values. Keep what later steps depend on in a buffer (register_buffer), or in "
            "get_extra_state and set_extra_state; a mere cache may stay as it is"
        ]

    def _values(self) -> Iterator[tuple[str, str, object]]:
        for prefix, module in self.model.named_modules():
            dot = f"{prefix}." if prefix else ""
            for key in module._non_persistent_buffers_set:
                if _is_readable(buffer := module._buffers.get(key)):
                    yield f"{dot}{key}", "non-persistent buffer", _digest(buffer)
            keeps_more = type(module).get_extra_state is not nn.Module.get_extra_state
            if not _is_known(module) and not keeps_more:
                yield from _attributes(dot, module)
        if not _is_known(self.task):
            yield from _attributes("Task.", self.task)


def _attributes(prefix: str, owner: object) -> Iterator[tuple[str, str, object]]:
    for key, value in getattr(owner, "__dict__", {}).items():
        if key in _OF_TORCH:
            continue
        if isinstance(value, bool | int | float):
            yield f"{prefix}{key}", type(value).__name__, repr(value)
        elif _is_readable(value) and not value.requires_grad:  # otherwise it is an activation that is looked at
            yield f"{prefix}{key}", "tensor", _digest(value)


def _is_known(owner: object) -> bool:
    """Whether the class of an object is of a known package. FSDP gives each module a class that it makes from it."""
    own = next(kind for kind in type(owner).__mro__ if not kind.__name__.startswith("FSDP"))
    return own.__module__.partition(".")[0] in _KNOWN


def _is_readable(value: Any) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and not value.is_meta and not value.is_nested


def _digest(tensor: Tensor) -> object:
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()
    return tuple(tensor.shape), tensor.dtype, zlib.crc32(values.data)
