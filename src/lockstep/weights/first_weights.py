"""Load initial weights: from safetensors, from a run, or from a `torch.save` file, which `torch_file` reads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.checkpoint.store import Checkpoint
from lockstep.core.errors import UsageError, listed
from lockstep.core.parallel.sharded_tensor import is_sharded, local_shard, own_columns
from lockstep.weights.run_weights import DTYPES, StoredTensor, in_checkpoint, in_memory
from lockstep.weights.torch_file import TorchFile, unwrapped

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # for weights in several files, as Hugging Face writes them
_SHOWN = 8  # names in an error
# Types that a file may contain. Others, such as 8-bit floats, are meaningless without their scales.
_DTYPES = {name: getattr(torch, of_torch) for of_torch, name in DTYPES.items()}


def load_weights(
    model: nn.Module,
    source: Path,
    skip: Sequence[str] = (),
    checkpoint: Checkpoint | None = None,
    torch_file: TorchFile | None = None,
) -> list[str]:
    """Copy weights by name into the parameters and persistent buffers of `model`, in their dtype and on their device.

    The file must contain exactly the tensors of the model's state_dict, with their shapes, except names that match a
    pattern in `skip`. Prefixes that wrappers add to all names in a file (`module.`) are removed. For tied parameters,
    one name is enough. All tensors are checked before the first is loaded, so on an error nothing is loaded. If the
    model is sharded, every rank reads its own rows.

    Args:
        model: the model of the task, possibly sharded, but not inside DDP.
        source: a safetensors file, or a folder with `model.safetensors`, or with several files and
            `model.safetensors.index.json`.
        skip: shell patterns. Matching tensors of the model keep their values; matching tensors of the file are ignored.
        checkpoint: the checkpoint of the run, if `source` is a run directory.
        torch_file: the content of `source`, if it is a `torch.save` file.

    Returns:
        names of the model that were skipped, sorted, without names that are tied to a loaded name.

    Raises:
        UsageError: there is no such file, it is damaged or from a different model, or a pattern does not match
            anything.
    """
    with contextlib.ExitStack() as opened:
        own = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
        if checkpoint is not None:
            stored = in_checkpoint(checkpoint)
        else:
            if torch_file is None:
                found = {name: _in_file(file, name) for name, file in _open_tensors(source, opened).items()}
            else:
                found = {name: in_memory(tensor) for name, tensor in torch_file.weights.items()}
            stored = {name: found[key] for name, key in unwrapped(found, own).items()}
        loaded = _names_to_load(own, stored, skip, source)
        with torch.no_grad():
            for name in loaded:
                shard = local_shard(own[name])
                is_part = is_sharded(own[name]) and shard.shape
                rows = slice(shard.start, shard.start + len(shard.local)) if is_part else None
                shard.local.copy_(own_columns(stored[name].read(rows), own[name]))
    filled = {_memory(own[name]) for name in loaded}
    return sorted(name for name in own if _memory(own[name]) not in filled)


def _names_to_load(
    own: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], skip: Sequence[str], source: Path
) -> list[str]:
    """The names of the tensors to load, after checking that all of them can be loaded.

    Args:
        own: the tensors of the model.
        stored: the tensors of the file.
        skip: shell patterns of names to leave out.

    Raises:
        UsageError: a pattern does not match anything, a tensor is missing, unknown or has a different shape, or nothing
            remains.
    """
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in own.keys() | stored.keys()):
            what = f"{pattern!r} does not match any tensor of the model or of {source}"
            remedy = f"use patterns over names such as: {listed([*own], _SHOWN)}"
            raise UsageError(what, where="train.init_skip", remedy=remedy)
    wanted, given = _unmatched(own, skip), _unmatched(stored, skip)
    both = [name for name in wanted if name in given]
    first: dict[object, str] = {}  # for each tensor of the model, the first of its names that is loaded
    for name in both:
        first.setdefault(_memory(own[name]), name)
    missing = [name for name in wanted if name not in given and _memory(own[name]) not in first]
    unexpected = sorted(name for name in given if name not in own)
    differing = [text for name in both if (text := _difference(name, first[_memory(own[name])], own, stored))]
    if missing or unexpected or differing:
        kinds = {"missing in the file": missing, "unknown to the model": unexpected, "differing": differing}
        raise UsageError(
            f"{source} belongs to a different model: "
            + "; ".join(f"{len(names)} {kind}: {listed([*names], _SHOWN)}" for kind, names in kinds.items() if names),
            where="train.init_from",
            remedy="use the task that the weights were made with, or add patterns to train.init_skip "
            "for the tensors that should keep the model's initial values",
        )
    if not both:
        remedy = "use narrower patterns, or remove train.init_from"
        raise UsageError(f"leaves no tensor of {source} to load", where="train.init_skip", remedy=remedy)
    return both


def _in_file(file: Any, name: str) -> StoredTensor:
    """A tensor of an open safetensors file."""
    part = file.get_slice(name)
    return StoredTensor(
        part.get_shape(), part.get_dtype(), lambda rows: file.get_tensor(name) if rows is None else part[rows]
    )


def _open_tensors(source: Path, opened: contextlib.ExitStack) -> dict[str, Any]:
    """The open file of each tensor, by its name."""
    if source.is_dir() and not (source / _WEIGHTS).exists():
        return _open_several(source, opened)
    file = _open(source / _WEIGHTS if source.is_dir() else source, opened)
    return dict.fromkeys(file.keys(), file)


def _open_several(folder: Path, opened: contextlib.ExitStack) -> dict[str, Any]:
    """The same for weights in several files with an index."""
    path = folder / _INDEX
    if not path.exists():
        what = f"{folder} has neither {_WEIGHTS} nor {_INDEX}"
        remedy = "give a safetensors file, a folder with one of these, or a run directory"
        raise UsageError(what, where="train.init_from", remedy=remedy)
    try:
        places = {name: folder / part for name, part in json.loads(path.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{path} is not an index of safetensors files: {error!r}"
        raise UsageError(what, where="train.init_from", remedy="it is damaged; fetch or export it again") from error
    files = {part: _open(part, opened) for part in sorted(set(places.values()))}
    names = {part: set(file.keys()) for part, file in files.items()}
    if lost := [name for name, part in places.items() if name not in names[part]]:
        what = f"{path} lists tensors that the files do not contain: {listed([*lost], _SHOWN)}"
        raise UsageError(
            what, where="train.init_from", remedy="the folder mixes files of several models; fetch or export it again"
        )
    return {name: files[part] for name, part in places.items()}


def _open(path: Path, opened: contextlib.ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return opened.enter_context(safe_open(path, framework="pt"))
    except FileNotFoundError as error:
        remedy = (
            f"give a safetensors or torch.save file, or a folder with {_WEIGHTS} or {_INDEX} and the files that "
            "it lists"
        )
        raise UsageError(f"there is no {path}", where="train.init_from", remedy=remedy) from error
    except (OSError, SafetensorError) as error:
        remedy = "it is damaged, or has a different format: fetch or export it again, as safetensors"
        what = f"{path} cannot be read as a safetensors file: {error}"
        if Path(path).is_file() and Path(path).suffix != ".safetensors":
            is_empty = not Path(path).stat().st_size
            what = f"{path} is {'empty' if is_empty else 'neither a torch.save file nor a safetensors file'}"
            remedy = "write or fetch it again: it is damaged or has a different format"
        raise UsageError(what, where="train.init_from", remedy=remedy) from error


def _difference(name: str, first: str, own: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> str | None:
    """The reason why a tensor cannot be loaded; None if it can.

    Args:
        first: the first loaded name of the same tensor of the model; `name` itself unless tensors are tied.
    """
    tensor, shape, dtype = own[name], stored[name].shape, stored[name].dtype
    if shape != list(tensor.shape):
        return f"{name} (file {shape}, model {list(tensor.shape)})"
    if dtype not in _DTYPES or (_DTYPES[dtype].is_floating_point, _DTYPES[dtype].is_complex) != (
        tensor.is_floating_point(),
        tensor.is_complex(),
    ):
        return f"{name} (file {dtype}, model {tensor.dtype})"
    if first != name and not torch.equal(*(stored[key].read(None).to(tensor.dtype) for key in (name, first))):
        return f"{name} (the same tensor as {first} in the model, but not in the file)"
    return None


def _memory(tensor: Tensor) -> object:
    """A key that is equal for tensors that share their memory."""
    if is_sharded(tensor):
        return id(tensor)  # this rank may not have any row of it
    return tensor.device, tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride()


def _unmatched(values: Mapping[str, Any], patterns: Sequence[str]) -> dict[str, Any]:
    return {
        name: value for name, value in values.items() if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }
