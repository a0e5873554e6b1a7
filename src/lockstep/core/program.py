"""The program of an exported model: a file of `torch.export`, which torch runs without the code of the model."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from lockstep.core.foreign_errors import first_line

FILE = "model.pt2"
SCRIPT = "use_model.py"
_SIGNATURE = "model.json"
_MOST_DIMENSIONS = 8
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5  # differences between a model and its program that rounding explains


@dataclass(frozen=True)
class Program:
    """The computation of the exported model, from tensors to tensors."""

    module: nn.Module
    """It computes what torch can trace: which operations there are must not depend on the values of tensors."""
    inputs: Mapping[str, Any]
    """The arguments of an example, by name: tensors, or trees of tensors."""
    dynamic: Any = None
    """Dimensions that may have other sizes, in the form of `torch.export.export`. None: as many as torch allows."""
    other: Mapping[str, Any] | None = None
    """Arguments of other sizes, of a single sample, with which the program is tried."""
    batch: int | None = None
    """The number of samples in a batch. None: any number."""
    script: Path | None = None
    """A Python file that prepares inputs and explains outputs. It is copied, so it imports nothing of this package."""


class Computed(nn.Module):
    """`compute(model, batch)` as a module, which is called as `module(batch=...)`."""

    def __init__(self, compute: Callable[[nn.Module, Any], Any], model: nn.Module) -> None:
        super().__init__()
        self.compute, self.model = compute, model

    def forward(self, batch: Any) -> Any:
        return self.compute(self.model, batch)


def write_program(program: Program, folder: Path) -> list[str]:
    """Write `model.pt2`, `model.json` (the types and shapes of its inputs), and `use_model.py` if there is a script.

    The program is loaded again, and compared with the model. If torch cannot trace the model, or if the program says
    something else, nothing is written.

    Returns:
        warnings: why there is no program.

    Raises:
        OSError: a file cannot be written.
    """
    errors: list[Exception] = []
    for attempt in _attempts(program):
        try:
            with warnings.catch_warnings(), _quiet(), torch.no_grad():
                warnings.simplefilter("ignore")
                _write(attempt, folder)
        except OSError:
            raise
        except Exception as error:  # torch.export raises errors of many kinds, also those of the model's own code
            (folder / FILE).unlink(missing_ok=True)
            errors.append(error)
        else:
            if program.script is not None:
                shutil.copyfile(program.script, folder / SCRIPT)
            return []
    return [without_program(errors[0])]


def _attempts(program: Program) -> list[Program]:
    """The program; then programs with which some models can be traced that torch cannot trace otherwise.

    These have one sample in a batch, if it is known which dimensions may have other sizes. Otherwise fewer dimensions
    may have other sizes: as many as torch allows; the first of each tensor; none.
    """
    if program.dynamic is not None:
        fixed = {name: {place: dim for place, dim in of.items() if place} for name, of in program.dynamic.items()}
        single = {name: value[:1] for name, value in program.inputs.items()}
        return [program, replace(program, inputs=single, dynamic=fixed, batch=1)]

    def first(most: int) -> Any:
        def of(leaf: Any) -> Any:
            return dict.fromkeys(range(min(most, leaf.dim())), Dim.AUTO) if isinstance(leaf, Tensor) else None

        return pytree.tree_map(of, dict(program.inputs))

    return [replace(program, dynamic=dynamic) for dynamic in (first(_MOST_DIMENSIONS), first(1), None)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs what it guessed of sizes. The comparison of the program with the model is what counts."""
    loggers = [logging.getLogger(name) for name in ("torch._export", "torch.export", "torch.fx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def without_program(error: Exception) -> str:
    """The warning that an export has no program."""
    return f"there is no {FILE}, so the weights need the code of the model: {first_line(error)}"


def _write(program: Program, folder: Path) -> None:
    module, inputs = program.module.eval(), dict(program.inputs)
    exported = torch.export.export(module, (), inputs, dynamic_shapes=program.dynamic, strict=False)
    torch.export.save(exported, folder / FILE)
    loaded = torch.export.load(folder / FILE).module()
    for arguments in (inputs, program.other):
        if arguments is not None:
            _compare(module(**arguments), loaded(**arguments))
    about = {"torch": torch.__version__, "batch": program.batch, "inputs": _described(exported)}
    (folder / _SIGNATURE).write_text(json.dumps(about, indent=1))


def _compare(wanted: Any, found: Any) -> None:
    """Raise ValueError if the program says something else than the model."""
    for one, other in zip(pytree.tree_leaves(wanted), pytree.tree_leaves(found), strict=True):
        if not isinstance(one, Tensor) or not one.is_floating_point():
            continue
        if not torch.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True):
            raise ValueError(f"the program differs from the model by {float((one - other).abs().max()):.2g}")


def _described(exported: torch.export.ExportedProgram) -> Any:
    """The arguments by name, with type and shape instead of each tensor. A size that is a name, such as `s34`, may be
    any size."""
    nodes = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    texts = []
    for name in exported.graph_signature.user_inputs:
        value = nodes.get(name) if isinstance(name, str) else name
        if isinstance(value, Tensor):
            value = f"{str(value.dtype).removeprefix('torch.')} ({', '.join(map(str, value.shape))})"
        texts.append(value if isinstance(value, str | int | float | None) else str(value))
    _, named = pytree.tree_unflatten(texts, exported.call_spec.in_spec)
    return named
