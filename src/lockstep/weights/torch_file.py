"""`torch.save` files of plain training scripts, with weights and possibly the state of an optimizer. They are read with
`weights_only`: only tensors and plain values. Code that a file requests is never called."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import UsageError, listed

WHERE = "train.init_from"
OPTIMIZER_CLASS = "optimizer_class"
"""The key under which `lockstep export --optimizer` writes the name of the optimizer's class."""

# The keys that scripts use, by kind. All are looked up; a file may have one key of each kind.
_WEIGHTS = ("model", "state_dict", "model_state_dict", "model_state", "net", "network", "module", "weights")
_OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optimizer_state", "optim", "optimizer_states")
_SCALERS = ("scaler", "scaler_state_dict", "grad_scaler", "grad_scaler_state_dict")
_ABOUT = (OPTIMIZER_CLASS, "lockstep")
_SHOWN = 8  # keys in an error or in a line of the log
_PREFIXES = ("module.", "_orig_mod.", "model.")
_COMPILED = "_orig_mod."
_UNSAFE = re.compile(r"GLOBAL ([\w.]+)")  # in torch's message: what unpickling would call


@dataclass(frozen=True)
class TorchFile:
    """The content of a `torch.save` file."""

    path: Path
    weights: Mapping[str, Tensor]
    """By the names that they have in the file."""
    place: str
    """Their place in the file, for messages."""
    optimizer: Any = None
    """The state of an optimizer; None: there is none."""
    optimizer_class: str | None = None
    """The name of its class, if the file contains it."""
    scaler: Any = None
    """The state of a `GradScaler`; None: there is none."""
    others: tuple[str, ...] = ()
    """The rest of the file, for messages."""


def is_torch_file(path: Path) -> bool:
    """True if a file starts like a `torch.save` file and does not have the suffix of a safetensors file."""
    if path.suffix == ".safetensors" or not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(2)
    return start in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04")  # a zip file, or before torch 1.6 a pickle


def read(path: Path) -> TorchFile:
    """Read a `torch.save` file. The bytes of a tensor are read when the tensor is used.

    Raises:
        UsageError: it is damaged, contains more than tensors and plain values, or does not contain weights.
    """
    content = _load(path)
    if not isinstance(content, Mapping):
        raise UsageError(
            f"{path} contains a {type(content).__name__}, not weights by name", where=WHERE, remedy=_remedy()
        )
    values = {str(key): value for key, value in content.items()}
    found = [key for key in _WEIGHTS if _tensors(values.get(key))]
    if len(found) > 1:
        raise UsageError(
            f"{path} contains weights under {' and under '.join(map(repr, found))}",
            where=WHERE,
            remedy="save the weights to use in their own file: torch.save(weights, FILE)",
        )
    if not found:
        if not _tensors(values):
            what = f"{path} does not contain weights by name. It has the keys {listed([*map(repr, values)], _SHOWN)}"
            raise UsageError(what, where=WHERE, remedy=_remedy())
        return TorchFile(path, _tensors(values), "the whole file", others=_no_tensors(values, ()))
    optimizer, scaler = (
        next((key for key in keys if isinstance(values.get(key), Mapping | list)), None)
        for keys in (_OPTIMIZERS, _SCALERS)
    )
    state = values[optimizer] if optimizer else None
    inner = _no_tensors(values[found[0]], (), f"{found[0]}.")
    return TorchFile(
        path,
        _tensors(values[found[0]]),
        f"its key {found[0]!r}",
        optimizer=state[0] if isinstance(state, list) and len(state) == 1 else state,  # Lightning writes a list
        optimizer_class=values.get(OPTIMIZER_CLASS),
        scaler=(values[scaler] or None) if scaler else None,
        others=(*_no_tensors(values, (found[0], optimizer, scaler, *_ABOUT), tensors=True), *inner),
    )


def unwrapped(names: Iterable[str], own: Container[str] | Iterable[str]) -> dict[str, str]:
    """The names in a file, by their names without the prefixes that wrappers add to all of them.

    DDP and DataParallel add `module.`, torch.compile `_orig_mod.` (also in the middle of a name), and Lightning modules
    often `model.`.

    Args:
        own: the names in the model. A prefix of one of them belongs to the model.
    """
    own_names = list(own)  # type: ignore[arg-type]
    found = {name: name for name in names}
    if not any(_COMPILED in name for name in own_names):
        shorter = {name.replace(_COMPILED, ""): name for name in found}
        found = shorter if len(shorter) == len(found) else found
    for _ in range(len(_PREFIXES)):
        for prefix in _PREFIXES:
            is_before_all = bool(found) and all(name.startswith(prefix) for name in found)
            if is_before_all and not any(name.startswith(prefix) for name in own_names):
                found = {name.removeprefix(prefix): in_file for name, in_file in found.items()}
    return found


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        match = _UNSAFE.search(str(error))
        if match is None:
            raise _damaged(path, error) from error
        raise UsageError(
            f"{path} cannot be read safely: it would call {match[1]}. A torch.save file can run arbitrary code this "
            "way, so Lockstep reads only tensors and plain values (weights_only=True)",
            where=WHERE,
            remedy=(
                "if you trust the file, load it with the code that wrote it, and save only its state dicts. "
                f"{_remedy()}"
            ),
        ) from error
    except Exception as error:  # a damaged zip file or pickle may raise any exception
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UsageError:
    first = (str(error).splitlines() or [""])[0] or type(error).__name__
    remedy = "it is damaged, or not a torch.save file: fetch or save it again"
    return UsageError(f"{path} cannot be read as a torch.save file: {first}", where=WHERE, remedy=remedy)


def _remedy() -> str:
    return 'Save a dict such as {"model": model.state_dict(), "optimizer": optimizer.state_dict()}'


def _tensors(value: Any) -> dict[str, Tensor]:
    """The tensors directly in a mapping, by name; empty if `value` is not such a mapping."""
    if not isinstance(value, Mapping):
        return {}
    return {str(name): tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}


def _no_tensors(
    values: Mapping[Any, Any], taken: Container[str | None], prefix: str = "", tensors: bool = False
) -> tuple[str, ...]:
    """The remaining values of a mapping, for messages.

    Args:
        taken: keys to leave out.
        tensors: whether to include tensors.
    """
    words = []
    for key, value in values.items():
        if key in taken or (isinstance(value, Tensor) and not tensors):
            continue
        words.append(f"{prefix}{key}={value!r}" if isinstance(value, int | float) else f"{prefix}{key}")
    return tuple(words)
