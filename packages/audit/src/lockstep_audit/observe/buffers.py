"""Observes buffers that layers of a script compute, such as the codebook of a quantizer."""

from __future__ import annotations

from typing import Any

import torch

from lockstep_audit.observe import places
from lockstep_audit.observe.recorder import recorder

_LARGE = 1 << 22


def own(inner: Any) -> dict[str, tuple[Any, torch.Tensor]]:
    """Floating-point buffers that a checkpoint contains, except the statistics of normalizations, by name, each
    with its module."""
    found: dict[str, tuple[Any, torch.Tensor]] = {}
    for name, module in inner.named_modules():
        kept = {} if hasattr(module, "track_running_stats") else module._buffers
        kept = {key: b for key, b in kept.items() if b is not None and key not in module._non_persistent_buffers_set}
        each = {key: buffer for key, buffer in kept.items() if buffer.is_floating_point()}
        found |= {f"{name}.{key}".removeprefix("."): (module, buffer) for key, buffer in each.items()}
    return found


_noted: dict[int, int] = {}
"""By model, the last optimizer step after which its buffers were recorded."""


def before_forward(number: int, inner: Any, wrapper: Any) -> None:
    """Record the buffers of the script's layers when DDP is about to overwrite them with those of rank 0."""
    steps = recorder.counts.optimizer_steps
    if not steps or not recorder.is_sampled(steps) or _noted.get(number) == steps or hasattr(wrapper, "buffer_hook"):
        return
    _noted[number] = steps
    if not wrapper.will_sync_module_buffers():
        return
    told: dict[str, dict[str, Any]] = {"sums": {}, "files": {}, "classes": {}}
    for name, (module, buffer) in own(inner).items():
        files = [file for kind in type(module).__mro__ if (file := places.file_of(kind))]
        if files and buffer.numel() and name not in wrapper.parameters_to_ignore:
            told["sums"][name], told["files"][name], told["classes"][name] = _sums(buffer), files, type(module).__name__
    if told["sums"]:
        recorder.emit("own_buffers", limit=20, model=number, **told)


def _sums(buffer: torch.Tensor) -> list[float]:
    """A weighted sum, the norm, and the number of elements: they show differences that exceed rounding."""
    numbers = buffer.detach().flatten()[:_LARGE].double()
    weights = torch.arange(1, numbers.numel() + 1, dtype=torch.float64, device=numbers.device).cos()
    return [float(numbers @ weights), float(numbers.norm()), buffer.numel()]
