"""The pickle in a bundle: the task without its data, the model, the state and the micro-batches."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
from collections.abc import Generator
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from lockstep.core.errors import UsageError
from lockstep.core.task import Task

_LARGEST = 1 << 24
"""Bytes of an attribute of the task, without modules: larger ones are taken for data."""


class NotBundled:
    """Replaces what a bundle does not hold, such as a data set. Any use of it is an error that names it."""

    def __init__(self, what: str) -> None:
        self.__dict__["what"] = what

    def __reduce__(self) -> tuple[Any, ...]:
        return NotBundled, (self.__dict__["what"],)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle and copy ask for such attributes
            raise AttributeError(name)
        raise _error(self.__dict__["what"])

    def __getitem__(self, key: Any) -> Any:
        raise _error(self.__dict__["what"])

    def __len__(self) -> int:
        raise _error(self.__dict__["what"])

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise _error(self.__dict__["what"])


def _error(what: str) -> UsageError:
    remedy = "keep what the loss needs in another attribute, or in the model, and write the bundle again"
    return UsageError(f"the step needs {what}, which the bundle does not hold", where="bundle", remedy=remedy)


def save(file: IO[bytes], content: dict[str, Any], task: Task) -> None:
    """Write `content` and `task`, which loses its data sets; see `without_data`.

    Raises:
        UsageError: an object cannot be pickled.
    """
    try:
        torch.save({"task": task, **content}, file, pickle_module=_Pickle)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        what = f"the task, the model or a batch cannot be written: {error}"
        remedy = "for functions without a name, such as lambdas: pip install cloudpickle; otherwise keep the object "
        remedy += "in a variable of the module instead of an attribute"
        raise UsageError(what, where="bundle", remedy=remedy) from error


@contextlib.contextmanager
def without_data(task: Task) -> Generator[list[str], None, None]:
    """Inside, the task has placeholders for its attributes that are data, are large, or cannot be pickled.

    Yields:
        what was left out.
    """
    kept = dict(vars(task))
    left = []
    for name, value in kept.items():
        what = f"task.{name}, a {type(value).__name__}"
        try:
            if not isinstance(value, Dataset) and _size(value) <= _LARGEST:
                continue
        except Exception:  # whatever a class raises if it cannot be pickled
            what += " that cannot be pickled"
        left.append(what)
        vars(task)[name] = NotBundled(what)
    try:
        yield left
    finally:
        vars(task).update(kept)


def load(file: str, device: torch.device) -> dict[str, Any]:
    """What `save` has written. It runs code of the file.

    Raises:
        UsageError: the versions of classes do not fit.
    """
    try:
        found: dict[str, Any] = torch.load(file, map_location=device, weights_only=False)
    except (pickle.UnpicklingError, ImportError, AttributeError, TypeError) as error:
        what = f"the content of the bundle cannot be loaded: {type(error).__name__}: {error}"
        remedy = "use the versions that `bundle.json` in the archive names"
        raise UsageError(what, where="bundle", remedy=remedy) from error
    return found


_Base: Any = pickle.Pickler
with contextlib.suppress(ImportError):  # it also pickles functions without a name
    _Base = importlib.import_module("cloudpickle").Pickler


class _Pickler(_Base):  # type: ignore[misc]
    """Replaces data sets, wherever they are."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Dataset):
            return NotBundled, (f"a data set ({type(value).__name__})",)
        return super().reducer_override(value) if _Base is not pickle.Pickler else NotImplemented


class _Measuring(_Pickler):
    """Leaves out modules, too: a task may keep the model."""

    def persistent_id(self, value: Any) -> str | None:
        return "module" if isinstance(value, nn.Module) else None


_Pickle = SimpleNamespace(Pickler=_Pickler, dumps=pickle.dumps, __name__="pickle")
"""What `torch.save` uses instead of `pickle`."""


class _Counted(io.RawIOBase):
    """Counts the bytes that are written."""

    count = 0

    def write(self, data: Any) -> int:
        self.count += len(data)
        return len(data)


def _size(value: Any) -> int:
    """Bytes of a value as a pickle, without modules and data sets."""
    counted = _Counted()
    _Measuring(counted, protocol=4).dump(value)
    return counted.count
