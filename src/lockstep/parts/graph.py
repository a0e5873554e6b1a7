"""The graph of a model for TensorBoard."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn


class _Traceable(nn.Module):
    """`model` as a module from tensors to a tuple of tensors, which torch can trace.

    Args:
        args, kwargs: of an example call. The tensors among them are the arguments of the new module.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.args, self.kwargs = model, args, dict(kwargs)
        self.tensors = tuple(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        args = [next(given) if isinstance(value, Tensor) else value for value in self.args]
        kwargs = {name: next(given) if isinstance(value, Tensor) else value for name, value in self.kwargs.items()}
        return tuple(_tensors(self.model(*args, **kwargs)))


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in dataclasses, dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def write(folder: Path, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Write the graph of `model` into `folder`, as a separate event file.

    Args:
        args, kwargs: of a call of the model.

    Raises:
        RuntimeError: torch cannot trace the model; the text has its first line.
    """
    from torch.utils.tensorboard import SummaryWriter

    traceable = _Traceable(model, args, kwargs)
    printed = io.StringIO()  # torch prints why a trace failed, and also raises it
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # about branches that a trace does not follow
        # torch reads all attributes. Some models of transformers warn when they are read.
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        writer = SummaryWriter(str(folder))
        stack.callback(writer.close)
        try:
            writer.add_graph(traceable, traceable.tensors, use_strict_trace=False)
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise RuntimeError(first) from error
