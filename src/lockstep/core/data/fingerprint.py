"""A fingerprint of a data set, to notice that a resumed run has other data: its length and a few raw samples."""

from __future__ import annotations

import hashlib
import warnings
from collections import UserList, deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.core.data import inherited, private_generators, worker_deaths, workers
from lockstep.core.data.dataset import forward
from lockstep.core.data.executed_files import ExecutedFiles
from lockstep.core.data.handover import Failure, packed
from lockstep.core.data.randomness import restored, seed_all
from lockstep.core.data.tensors import moves_itself, values_of
from lockstep.core.errors import DataError, LockstepError

_DEPTH = 4


def fingerprint(data: Any) -> dict[str, Any]:
    """The length as `samples`, and a `digest` (SHA-256, hexadecimal) of the first, the middle and the last sample."""
    return of_digests(len(data), digests(data, looked_at(data)))


def looked_at(data: Any) -> list[int]:
    """The indices of the first, the middle and the last sample; of a stream, the first ones."""
    stream = forward(data)
    if stream is not None:
        return list(stream.compared)
    return sorted({0, (len(data) - 1) // 2, len(data) - 1}) if len(data) else []


def of_digests(length: int, digests: Sequence[str]) -> dict[str, Any]:
    """The fingerprint of a data set of this length, from the digests of its samples `looked_at`."""
    return {"samples": length, "digest": hashlib.sha256("".join([str(length), *digests]).encode()).hexdigest()}


def digests(data: Any, indices: Sequence[int], in_worker: bool = False, start_method: str | None = None) -> list[str]:
    """Digests of raw samples, each read under its own seed.

    Args:
        in_worker: read the samples in other processes. Loader workers must not inherit files that a data set opens with
            its first sample (HDF5, LMDB). Two workers read the same samples at the same time.
        start_method: of these processes; see `DataConfig`.

    Raises:
        DataError: the workers read different samples, or were killed again and again.
    """
    if not in_worker or forward(data) is not None:
        return _read_all(_Digests(data), indices, int(in_worker), start_method)
    pairs = _read_all(_Digests(data), _twice(indices), 2, start_method)
    found, others = pairs[::2], pairs[1::2]
    if differing := [index for index, one, other in zip(indices, found, others, strict=True) if one != other]:
        alone = _read_all(_Digests(data), _twice(differing), 1, start_method)
        again = zip(differing, alone[::2], alone[1::2], strict=True)
        repeated = [index for index, one, other in again if one == other]
        if repeated:  # a sample that one worker reads differently each time is random
            raise DataError(
                f"sample {repeated[0]} is different in two loader workers that read it at the same time, and in one "
                "worker it is always the same. The workers share something that reading changes (a connection, a "
                "temporary file, shared memory), or the sample depends on the worker",
                where=f"{type(data).__name__}.__getitem__",
                remedy=inherited.REMEDY,
            )
    return found


def _twice(indices: Sequence[int]) -> list[int]:
    return [index for index in indices for _ in range(2)]


def sample(data: Any, index: int, in_worker: bool = False, start_method: str | None = None) -> Any:
    """A raw sample, read under the seed with which its digest is made."""
    (found,) = _read_all(_Handed(data), [index], int(in_worker), start_method)
    if isinstance(found, Failure):
        raise found.error
    return found


def digest_of(value: Any) -> str:
    """SHA-256 (hexadecimal) of the values in a sample or a batch, however they are nested."""
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


UNREADABLE = hashlib.sha256(b"unreadable").hexdigest()
"""Replaces the digest of a sample that cannot be read."""


def _read_all(data: _Samples, indices: Sequence[int], count: int, start_method: str | None) -> list[Any]:
    def make() -> DataLoader[Any]:
        with warnings.catch_warnings():  # two workers for a moment, even on one core
            warnings.filterwarnings("ignore", "This DataLoader will create")
            return workers.data_loader(data, indices, count, stays=False, start_method=start_method)

    with restored(one.generator for one in data.private if one.generator is not None):  # they may split the data later
        return worker_deaths.read_all(make, f"samples {list(dict.fromkeys(indices))}")


class _Samples(Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self.files = ExecutedFiles()  # comes before objects of the classes in them
        self.data = data
        self.private = private_generators.on_host(data=data)

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "data": self.data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A worker that is not forked finds the generators again: it has its own global variables and classes."""
        vars(self).update(state)
        self.private = private_generators.on_host(data=self.data)

    def __getitem__(self, index: int) -> Any:
        seed_all(index, self.private)
        return self.data[index]


class _Handed(_Samples):
    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)
        try:
            return packed(found, "sample", f"{type(self.data).__name__}.__getitem__")
        except LockstepError as error:
            return Failure(error)


class _Digests(_Samples):
    def __getitem__(self, index: int) -> str:
        try:
            return digest_of(super().__getitem__(index))
        except Exception:  # the loader decides whether an unreadable sample is an error
            return UNREADABLE


def _add(digest: Any, value: Any, depth: int = _DEPTH) -> None:
    """Add tensors, arrays, images, text, numbers and containers of them to a digest; of other values their repr.

    Args:
        depth: how many objects that move themselves to a device, such as graphs, are examined within one another.
    """
    digest.update(f"|{type(value).__name__}:".encode())
    if isinstance(value, torch.Tensor):
        if value.is_quantized or value.is_meta or value.is_nested:
            digest.update(f"{value.dtype}{value.dim()}".encode())
        digest.update(str(tuple(value.shape)).encode() if value.is_meta else b"")
        for part in values_of(value):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray | np.generic):
        if isinstance(value, np.ma.MaskedArray):
            _add(digest, np.ma.getmaskarray(value))
            value = value.filled()
        digest.update(f"{value.dtype}{value.shape}".encode())
        if value.dtype.hasobject:
            _add(digest, value.tolist())
        else:
            digest.update(value.tobytes())
    elif isinstance(value, bytes | bytearray | memoryview):
        digest.update(bytes(value))
    elif isinstance(value, str | int | float | bool | None):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _add(digest, key)
            _add(digest, item)
    elif isinstance(value, list | tuple | deque | UserList):
        for item in value:
            _add(digest, item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _add(digest, getattr(value, field.name))
    elif hasattr(value, "tobytes") and hasattr(value, "size"):  # a PIL image
        digest.update(str(value.size).encode())
        digest.update(value.tobytes())
        palette = getattr(value, "getpalette", None)
        digest.update(bytes(palette() or ()) if callable(palette) else b"")
    elif isinstance(value, set | frozenset):
        digest.update(",".join(sorted(map(repr, value))).encode())
    else:
        if " at 0x" not in (text := repr(value)):  # a repr with an address would differ in the next process
            digest.update(text.encode())
        if moves_itself(value) and depth:  # it holds tensors, which its repr need not contain
            for name, item in getattr(value, "__dict__", {}).items():
                _add(digest, name)
                _add(digest, item, depth - 1)
