"""Observes what data sets contain: a few samples, read after training, and the first samples of streams."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import CodeType, FunctionType
from typing import Any

import torch

from lockstep_audit.observe import digests, places
from lockstep_audit.observe.data import loader_at
from lockstep_audit.observe.recorder import After, recorder

_PROBED, _MORE, _QUICK_S = 8, 64, 0.3
"""Samples that are read of each data set, and of one that reads fast: with few classes, few samples may differ."""
_GOLDEN = 0.6180339887498949  # spreads the chosen samples without a period
_VALUES = 64
_STREAMED = 8
_LISTED, _LEAST = 4096, 4
_PLAIN = (int, float, str, bytes, bool, type(None))
_PATIENCE_S = 5.0
_waiting: dict[int, tuple[Callable[[], Any], Any, dict[str, Any]]] = {}
_KEPT = 4
_kept: list[Any] = []
"""The first data sets. They are kept until they are read: a training function may end before the process group."""


def remember(loader: Any, described: Mapping[str, Any]) -> None:
    """A data set with a length. Some of its samples are read at the end."""
    dataset, size = loader.dataset, described["dataset_size"]
    if size and not described["is_iterable"] and described["epoch"] == 0:
        told = {"at": described["made_at"], "loader": described["loader"], "dataset_size": size}
        collate = loader.collate_fn if places.is_of_user(loader.collate_fn) else None
        is_kept = recorder.probe and len(_kept) < _KEPT
        _kept.extend([dataset] if is_kept else [])
        try:
            _waiting[described["loader"]] = (weakref.ref(dataset), collate, told)
        except TypeError:  # a list has no weak references
            if is_kept:
                _waiting[described["loader"]] = (lambda: dataset, collate, told)


def probe(*_: Any, **__: Any) -> After:
    """Before the process group ends, or at exit: the script has finished computing."""
    if not recorder.probe or recorder.rank is None or not recorder.counts.optimizer_steps or recorder.error is not None:
        return None
    end = time.monotonic() + _PATIENCE_S
    for number in list(_waiting):
        reference, collate, told = _waiting.pop(number)
        dataset = reference()
        if dataset is not None and time.monotonic() < end:
            recorder.guard("contents of data sets", _probe, dataset, collate, told)
    _kept.clear()
    return None


def at_exit() -> dict[str, Any]:
    """Read what has not been read yet."""
    probe()
    return {}


def _probe(dataset: Any, collate: Any, told: dict[str, Any]) -> None:
    """Read a few samples twice, with equal seeds. All random generators keep their states."""
    size, numpy = told["dataset_size"], sys.modules.get("numpy")
    states = (random.getstate(), numpy and numpy.random.get_state(), torch.get_rng_state())
    try:
        chosen = [size - 1, *(int(size * (part * _GOLDEN % 1)) for part in range(_MORE))]
        samples, end = {}, time.monotonic() + _QUICK_S
        for place, index in enumerate(dict.fromkeys(chosen)):
            if place > _PROBED and time.monotonic() > end:
                break
            first, second = _read(dataset, collate, index), _read(dataset, collate, index)
            samples[index] = [one if one == other else None for one, other in zip(first, second, strict=False)]
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
    recorder.emit("probe", samples=dict(sorted(samples.items())), **told)


def _read(dataset: Any, collate: Any, index: int) -> list[Any]:
    """The fields of a sample, and those that the script's collate function makes of it."""
    random.seed(index)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(index)
    torch.manual_seed(index)
    found = [_told(part) for part in parts(dataset[index])]
    if collate is not None:
        with contextlib.suppress(Exception):  # one sample may not make a batch
            found += [_told(part) for part in parts(collate([dataset[index]]))]
    return found


def parts(sample: Any) -> list[Any]:
    """The fields of a sample."""
    if isinstance(sample, Mapping):
        return list(sample.values())
    return list(sample) if isinstance(sample, (tuple, list)) else [sample]


def _told(part: Any) -> Any:
    """Whole numbers as they are; the digest of anything else that has one."""
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(part, numpy.ndarray) and part.dtype.kind in "iufb":
        part = torch.from_numpy(numpy.ascontiguousarray(part))
    if isinstance(part, torch.Tensor) and part.device.type == "cpu":
        is_whole = part.dtype in (torch.int64, torch.int32)
        return part.flatten()[:_VALUES].tolist() if is_whole else digests.of_tensors({"": part})[""]
    if isinstance(part, int) and not isinstance(part, bool):
        return [part]
    if isinstance(part, list) and part and all(type(each) is int for each in part):
        return part[:_VALUES]
    flat = part if isinstance(part, (list, tuple)) else [part]
    return digests.of_numbers(flat) if all(isinstance(each, _PLAIN) for each in flat) else None


_classes: set[type] = set()


def shard_made(shard: Any, dataset: Any, *_: Any, **__: Any) -> After:
    """Accelerate's IterableDatasetShard, which takes every n-th shard of what should be one stream on all ranks."""
    at = places.here()

    def after(result: Any, error: BaseException | None) -> None:
        if error is None:
            _streams[id(dataset)] = (weakref.ref(dataset), at, int(shard.num_processes))
            _watch(type(dataset))

    return after


def dispatched(loader: Any, dataset: Any, *_: Any, **__: Any) -> None:
    """Accelerate's DataLoaderDispatcher: the first rank reads its stream and sends shards of it to the others."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        held = dict(vars(dataset))
        if dealt := held.get("_distributed"):  # of datasets' split_dataset_by_node
            used, held = {"rank", "world_size"}, dict(vars(dealt))
        else:
            used = {name for base in type(dataset).__mro__ if places.file_of(base) for name in _used(base)}
        parts = {name: part for name in held if name in used and (part := _part(held[name])) is not None}
        asks = _asked(dataset)
        recorder.emit("dispatched", limit=8, at=loader_at(dataset) or places.here(), parts=parts, asks=asks)


_WORDS = {
    **dict.fromkeys(("get_rank", "process_index", "rank", "global_rank", "RANK"), "rank"),
    **dict.fromkeys(("get_world_size", "num_processes", "world_size", "WORLD_SIZE"), "ranks"),
}


def _asked(dataset: Any) -> dict[str, list[Any]]:
    """What `__iter__`, and functions of the script that it calls, read outside the stream: by name, value and place.

    For a whole number that is a global variable: the value. For other names of the rank or of the number of ranks:
    which of the two. What the stream itself holds is not included.
    """
    functions, found = [inspect.unwrap(type(dataset).__iter__)], dict[str, list[Any]]()
    for function in functions:
        if not isinstance(function, FunctionType) or not places.is_of_user(function):
            continue
        codes = [function.__code__]
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            has_environment = not {"environ", "getenv"}.isdisjoint(code.co_names)
            for each in dis.get_instructions(code):
                kind, name = each.opname.partition("_")[2], each.argval
                is_text = kind.startswith("CONST")
                if not isinstance(name, str) or not kind.startswith(("GLOBAL", "ATTR", "METHOD", "CONST")):
                    continue
                is_global = kind.startswith("GLOBAL")
                own = function.__globals__.get(name) if is_global else inspect.getattr_static(dataset, name, None)
                own = None if is_text else getattr(own, "fget", own)
                told: Any = own if type(own) is int and is_global else None
                if isinstance(own, FunctionType) and places.is_of_user(own):
                    functions += [own] if own not in functions else []
                elif (own is None or callable(own)) and (has_environment or not is_text):
                    told = _WORDS.get(name)
                if told is not None:
                    line = each.positions.lineno if each.positions else code.co_firstlineno
                    found.setdefault(name, [told, [places.kind_of(code)[1], line, code.co_name]])
    return found


def _used(kind: type) -> Iterator[str]:
    """The names that functions of a class use, except its constructor."""
    codes = [each.__code__ for name, each in vars(kind).items() if hasattr(each, "__code__") and name != "__init__"]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        yield from code.co_names


def _part(held: Any) -> int | list[str] | None:
    """What a data set holds: a number, or the least digests of a list in any order. None: too few, or another type."""
    if isinstance(held, int):
        return None if isinstance(held, bool) else held
    if isinstance(held, (str, PurePath)):
        held = [held] if os.path.exists(held) else ()
    if not isinstance(held, (list, tuple)) or len(held) > _LISTED:
        return None
    held = [str(each) if isinstance(each, PurePath) else each for each in held]
    is_long = len(held) >= _LEAST or (len(held) > 0 and all(isinstance(each, str) for each in held))
    told = [_told(each) for each in held] if is_long else []
    return sorted(map(str, told))[:_STREAMED] if told and None not in told else None


_streams: dict[int, tuple[weakref.ref[Any], list[str | int] | None, int]] = {}


def _watch(kind: type) -> None:
    """Record the first samples of streams of a class, and pass them on to whoever reads the stream."""
    original = kind.__dict__.get("__iter__")
    if original is None or kind in _classes:
        return
    _classes.add(kind)

    @functools.wraps(original)
    def observed(stream: Any) -> Iterator[Any]:
        found = _streams.pop(id(stream), None)
        if found is None or found[0]() is not stream:
            return iter(original(stream))
        return _first(iter(original(stream)), *found[1:])

    kind.__iter__ = observed  # type: ignore[attr-defined]


def _first(stream: Iterator[Any], at: list[str | int] | None, shards: int) -> Iterator[Any]:
    seen: list[Any] = []
    for sample in stream:
        if len(seen) < _STREAMED:
            seen.append(recorder.guard("streams", lambda one=sample: [_told(part) for part in parts(one)]))
            if len(seen) == _STREAMED:
                recorder.emit("stream", at=at, shards=shards, samples=seen)
        yield sample
