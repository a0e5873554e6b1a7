"""model.txt: the layers of a model with their outputs, parameters and floating-point operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.core import run_folder
from lockstep.core.errors import number_of
from lockstep.core.parallel import sharded_tensor

if TYPE_CHECKING:
    from torch import nn

FILE = run_folder.MODEL_TABLE
_RANKS_SHOWN = 8
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass
class ModelTrace:
    """The facts about a model that a forward pass showed."""

    outputs: dict[str, str] = field(default_factory=dict)
    """Shape of the output of each module's last call, by the module's name. The model itself is called ``."""
    flops: dict[str, int] = field(default_factory=dict)
    """Floating-point operations of all calls of each module, by the module's name."""
    total: int = 0
    """Floating-point operations of the whole pass. Some of them may be outside of the call of the model itself."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """Arguments of the first call of the model itself. None: it was not called, only parts of it."""


def trace(model: nn.Module, call: Callable[[], object]) -> ModelTrace:
    """Run `call`, which runs the model, and watch the model's modules.

    Operations are counted by `torch.utils.flop_counter.FlopCounterMode`: matrix products, convolutions and attention
    count, a multiplication and an addition as two, and everything else as nothing.
    """
    from torch.utils.flop_counter import FlopCounterMode

    found = ModelTrace()
    with FlopCounterMode(display=False) as counter, _watched(model, found, counter.get_total_flops):
        call()
        found.total = counter.get_total_flops()
    return found


@contextlib.contextmanager
def _watched(model: nn.Module, found: ModelTrace, total: Callable[[], int]) -> Generator[None, None, None]:
    """Inside, the calls of each module are recorded in `found`."""
    handles = []
    begun: dict[str, list[int]] = {}

    def before(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            begun.setdefault(name, []).append(total())
            if not name and found.arguments is None:
                found.arguments = args, dict(kwargs)

        return note

    def after(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            found.flops[name] = found.flops.get(name, 0) + total() - begun[name].pop()
            found.outputs[name] = _shape(output)

        return note

    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(after(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shape(output: Any) -> str:
    """The shape of the first tensor of an output, such as `1 x 10`."""
    if hasattr(output, "shape") and hasattr(output, "dtype"):
        return " x ".join(str(size) for size in output.shape) or "number"
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, tuple | list):
        return next((shape for shape in map(_shape, output) if shape), "")
    return ""


def table(model: nn.Module, found: ModelTrace | None, *, note: str = "") -> str:
    """The text of model.txt.

    Args:
        found: what a forward pass of one sample showed. None: output shapes and operations are left out.
        note: why they are left out.
    """
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    lines = [
        f"{type(model).__name__}: {number_of(sum(p.numel() for p in parameters), 'parameter')}, {trained:,} of "
        "them trainable"
    ]
    if found is not None:
        lines += [
            f"One sample takes {_operations(found.total)}FLOP in a forward pass. Matrix products, convolutions and",
            "attention count, a multiplication and an addition as two. Outputs are those of a batch of one sample.",
        ]
    lines += [note] if note else []
    rows = [("layer", "kind", "output", "parameters", "FLOP")]
    flops = found.flops | {"": found.total} if found else {}
    for name, module in model.named_modules():
        depth = name.count(".") + 1 if name else 0
        rows.append(
            (
                "  " * depth + (name.rpartition(".")[2] or "(the model)"),
                type(module).__name__,
                found.outputs.get(name, "") if found else "",
                f"{sum(p.numel() for p in module.parameters()):,}",
                _operations(flops[name]) if flops.get(name) else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join([*lines, "", *(_row(row, widths) for row in rows), *_shards(model), ""])


def _shards(model: nn.Module) -> list[str]:
    """A table with the rows of each sharded parameter that each rank holds. Empty: no parameter is sharded."""
    rows = []
    for name, parameter in model.named_parameters():
        if held := sharded_tensor.rows_by_rank(parameter):
            rows.append((name, _shape(parameter), _counted(held)))
    if not rows:
        return []
    rows.insert(0, ("sharded parameter", "shape", "rows by rank"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["", *(_row(row, widths) for row in rows)]


def _counted(held: list[int]) -> str:
    """`3, 3, 3, 1`; more than 8 ranks are counted: `3 on 9 ranks`."""
    if len(held) <= _RANKS_SHOWN:
        return ", ".join(map(str, held))
    return ", ".join(f"{count} on {number_of(held.count(count), 'rank')}" for count in dict.fromkeys(held))


def _row(row: tuple[str, ...], widths: list[int]) -> str:
    texts = [
        text.rjust(width) if place > 2 else text.ljust(width)
        for place, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(texts).rstrip()


def _operations(count: int) -> str:
    """A number with a unit: `12.3 M`."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} "
