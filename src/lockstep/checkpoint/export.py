"""Weights out, for use without Lockstep, and in, to start from. Safetensors only: nothing is unpickled."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.store import sync
from lockstep.distributed.sharded_tensor import is_sharded, local_shard
from lockstep.errors import CheckpointError, UsageError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"  # as Hugging Face writes it
_STAGING = ".staging-export-"
_SHOWN = 8

# What a file may hold. Others, such as eight-bit floats, mean nothing without the scales that lie beside them.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def export_weights(
    tensors: Mapping[str, Tensor],
    folder: Path,
    about: Mapping[str, str],
    extras: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Write `folder/model.safetensors` so that a kill at any instant leaves all of `folder`, or nothing of that name.

    Args:
        tensors: whole tensors, on any device, also tied or non-contiguous ones: each is written by itself.
        folder: new, or empty. Missing parents are made.
        about: text for the file's metadata, beside `{"format": "pt"}`.
        extras: writes further files into the folder it is given, which becomes `folder`. What it raises comes through,
            but for an OSError.

    Returns:
        The file with the weights.

    Raises:
        UsageError: `folder` is a file, or holds something.
        CheckpointError: the disk is full or not writable; nothing is left behind.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = folder.resolve()
    staging = written = folder.parent / f"{_STAGING}{folder.name}"
    made: list[Path] = []
    try:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(
                "exists and is not empty" if folder.is_dir() else "is a file",
                where=str(folder),
                remedy="give a new or empty folder",
            )
        made = [parent for parent in staging.parents if not parent.exists()]
        shutil.rmtree(staging, ignore_errors=True)  # of an export that was killed
        staging.mkdir(parents=True)
        save_file(_independent(tensors), staging / _WEIGHTS, metadata={"format": "pt", **about})
        (staging / _WEIGHTS).chmod(staging.stat().st_mode & 0o666)  # safetensors lets nobody but the owner read
        extras(staging)
        for path in (*staging.rglob("*"), staging):
            sync(path)
        written = staging.rename(folder)
        sync(folder.parent)
    except BaseException as error:
        shutil.rmtree(written, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        free = _free_mib(folder)
        remedy = "free disk space, repair permissions, or give another folder"
        raise CheckpointError(
            f"cannot be written with {free} MiB free: {error}", where=str(folder), remedy=remedy
        ) from error
    return folder / _WEIGHTS


def load_weights(model: nn.Module, source: Path, skip: Sequence[str] = ()) -> list[str]:
    """Copy weights by name into `model`'s parameters and persistent buffers, in their dtype and on their device.

    Every tensor of the model's state_dict must be in the file with its shape, and the other way round, except for names
    that match a pattern in `skip`. Of tied parameters one name is enough. Tensors are read one at a time, after all were
    checked: on an error nothing is loaded. Of a sharded model's tensors every rank reads its own rows.

    Args:
        model: as the task made it, or sharded; not inside DDP.
        source: a safetensors file, or a folder with `model.safetensors` or, in parts, `model.safetensors.index.json`.
        skip: shell patterns. What they match stays as the model made it; in the file it is ignored.

    Returns:
        The model's names that were skipped, sorted: without those tied to one that was loaded.

    Raises:
        UsageError: no such file, a damaged one, one of another model, or a pattern that matches nothing.
    """
    with contextlib.ExitStack() as opened:
        found = _contents(source, opened)
        own = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
        for pattern in skip:
            if not any(fnmatchcase(name, pattern) for name in own.keys() | found.keys()):
                remedy = f"use patterns over names such as: {_listed(own)}"
                raise UsageError(
                    f"{pattern!r} matches no tensor of the model and none of {source}",
                    where="train.init_skip",
                    remedy=remedy,
                )
        wanted, given = _unmatched(own, skip), _unmatched(found, skip)
        both = [name for name in wanted if name in given]
        first: dict[object, str] = {}  # of the loaded names that are one tensor in the model
        for name in both:
            first.setdefault(_memory(own[name]), name)
        missing = [name for name in wanted if name not in given and _memory(own[name]) not in first]
        unexpected = sorted(name for name in given if name not in own)
        differing = [text for name in both if (text := _difference(name, first[_memory(own[name])], own, found))]
        if missing or unexpected or differing:
            kinds = {"missing in the file": missing, "unknown to the model": unexpected, "differing": differing}
            raise UsageError(
                f"{source} is of another model: "
                + "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names),
                where="train.init_from",
                remedy="use the task that the weights were made with, or add patterns to train.init_skip for what shall stay as the model makes it",
            )
        if not both:
            raise UsageError(
                f"leaves nothing of {source} to load",
                where="train.init_skip",
                remedy="use narrower patterns, or leave out train.init_from",
            )
        with torch.no_grad():
            for name in both:
                rows = local_shard(own[name])
                end = rows.start + len(rows.local) if rows.shape else None
                rows.local.copy_(
                    found[name].get_slice(name)[rows.start : end]
                    if is_sharded(own[name])
                    else found[name].get_tensor(name)
                )
        return sorted(name for name in own if name not in wanted and _memory(own[name]) not in first)


def _independent(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no memory: safetensors refuses others."""
    seen: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        own[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return own


def _free_mib(folder: Path) -> int:
    """Free space where `folder` is, or would be."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free // 2**20
    return 0


def _contents(source: Path, opened: contextlib.ExitStack) -> dict[str, Any]:
    """Opened file by the names of its tensors."""
    if source.is_dir() and not (source / _WEIGHTS).exists():
        return _parts(source, opened)
    file = _open(source / _WEIGHTS if source.is_dir() else source, opened)
    return dict.fromkeys(file.keys(), file)


def _parts(folder: Path, opened: contextlib.ExitStack) -> dict[str, Any]:
    """The same of weights in several files, by their index."""
    path = folder / _INDEX
    if not path.exists():
        what, remedy = (
            f"{folder} has neither {_WEIGHTS} nor {_INDEX}",
            "give a safetensors file, or a folder with one of these",
        )
        raise UsageError(what, where="train.init_from", remedy=remedy)
    try:
        places = {name: folder / part for name, part in json.loads(path.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{path} is no index of safetensors files: {error!r}"
        raise UsageError(what, where="train.init_from", remedy="it is damaged; fetch or export it again") from error
    files = {part: _open(part, opened) for part in sorted(set(places.values()))}
    names = {part: set(file.keys()) for part, file in files.items()}
    if lost := [name for name, part in places.items() if name not in names[part]]:
        what = f"{path} places tensors in files that lack them: {_listed(lost)}"
        raise UsageError(
            what, where="train.init_from", remedy="the folder mixes files of several models; fetch or export it again"
        )
    return {name: files[part] for name, part in places.items()}


def _open(path: Path, opened: contextlib.ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return opened.enter_context(safe_open(path, framework="pt"))
    except FileNotFoundError as error:
        remedy = f"give a safetensors file, or a folder with {_WEIGHTS} or {_INDEX} and the files it names"
        raise UsageError(f"there is no {path}", where="train.init_from", remedy=remedy) from error
    except (OSError, SafetensorError) as error:
        remedy = "it is damaged, or of another format: fetch or export it again, as safetensors"
        raise UsageError(
            f"{path} cannot be read as a safetensors file: {error}", where="train.init_from", remedy=remedy
        ) from error


def _difference(name: str, same: str, own: Mapping[str, Tensor], found: Mapping[str, Any]) -> str | None:
    """Why `name` cannot be loaded; None where it can. `same`: the first loaded name of this tensor of the model."""
    tensor, stored = own[name], found[name].get_slice(name)
    shape, dtype = stored.get_shape(), stored.get_dtype()
    if shape != list(tensor.shape):
        return f"{name} (file {shape}, model {list(tensor.shape)})"
    if dtype not in _DTYPES or (_DTYPES[dtype].is_floating_point, _DTYPES[dtype].is_complex) != (
        tensor.is_floating_point(),
        tensor.is_complex(),
    ):
        return f"{name} (file {dtype}, model {tensor.dtype})"
    if same != name and not torch.equal(*(found[one].get_tensor(one).to(tensor.dtype) for one in (name, same))):
        return f"{name} (in the model one tensor with {same}, in the file another)"
    return None


def _memory(tensor: Tensor) -> object:
    """The same for tensors that are one in memory."""
    if is_sharded(tensor):
        return id(tensor)  # there may be nothing of it on this rank
    return tensor.device, tensor.data_ptr() or id(tensor), tensor.shape, tensor.stride()


def _unmatched(values: Mapping[str, Any], patterns: Sequence[str]) -> dict[str, Any]:
    return {
        name: value for name, value in values.items() if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")
