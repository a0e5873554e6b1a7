"""Observes data: loaders, samplers, splits, and the batches that the script gets."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lockstep.audit.observe import digests, orders, places
from lockstep.audit.observe.objects import Numbers, Registry
from lockstep.audit.observe.recorder import recorder

_INDICES = 100_000
_EACH = 50
_MOST_GIVEN = 256
IGNORED = -100
"""The label that losses of torch leave out."""
_MAPPED = 20_000
_CALLS = ("forwards_eval", "forwards_training", "backwards")
_SHUFFLING = {"RandomSampler": True, "SeedableRandomSampler": True, "WeightedRandomSampler": True}
_SHUFFLING |= {"SubsetRandomSampler": True, "SequentialSampler": False, "LengthGroupedSampler": True}

After = Callable[[Any, BaseException | None], None] | None


@dataclasses.dataclass
class Loader:
    """What is known of a DataLoader."""

    number: int
    made_at: list[str | int] | None
    subset: str | None = None
    mapped: list[int] | None = None
    """Of a Subset: the index below for each of its indices."""
    epochs: int = 0
    open: Pass | None = None


@dataclasses.dataclass
class Pass:
    """An iteration over a DataLoader."""

    loader: Loader
    epoch: int
    at: list[str | int] | None
    before: dict[str, int]
    is_map_style: bool
    rounds: int = 0
    """So many first batches are looked at: two of each worker of a stream."""
    drawn: deque[Any] = dataclasses.field(default_factory=deque)
    unwritten: list[list[int]] = dataclasses.field(default_factory=list)
    first_unwritten: int = 0
    written: int = 0
    due: int | None = None
    """The batches after which a framework asks for no more. None: the script itself asks, or nobody knows."""
    batches: int = 0
    samples: int = 0
    is_complete: bool = False
    is_closed: bool = False


_loaders: Registry[Loader] = Registry()
_passes: Registry[Pass] = Registry()
_open: dict[int, Pass] = {}
"""Iterations that have not ended, by the number of their loader, which may be gone before the script ends."""
_samplers = Numbers()
_samplers_at: Registry[list[str | int] | None] = Registry()
_made_for: Registry[list[str | int] | None] = Registry()
_skips: Registry[tuple[int, list[str | int] | None]] = Registry()
"""Of loaders that leave out their first batches: how many, and where the script asked for it."""
_count = 0
last: Pass | None = None
"""The iteration that began last."""
given: list[tuple[Pass, dict[str, Any]]] = []
"""Batches since the last optimizer step."""


def loader_made(loader: Any, dataset: Any, *_: Any, **named: Any) -> After:
    """DataLoader.__init__. A framework makes a loader anew: its place is that of the user's loader of the same data."""
    at, by_user = places.here(), places.is_by_user(sys._getframe(3))

    def after(result: Any, error: BaseException | None) -> None:
        global _count
        if error is None:
            known = loader_at(dataset)
            made_at = at if by_user or known is None else known
            if by_user:
                _weak(_made_for.put, dataset, at)
                _weak(orders.chosen, dataset, _samplers_in(loader), named.get("sampler"), _sampler_made)
            _loaders.put(loader, Loader(_count, made_at))
            _count += 1

    return after


def loader_at(dataset: Any) -> list[str | int] | None:
    """Where the script made the loader of a data set, or else the data set."""
    found: list[str | int] | None = _weak(_made_for.get, dataset)
    return found or _sampler_made(dataset)


def first_skipped(loader: Any, num_batches: int = 0) -> After:
    """skip_first_batches of Accelerate."""
    at = places.here()

    def after(result: Any, error: BaseException | None) -> None:
        if error is None and num_batches:
            _skips.put(getattr(result, "base_dataloader", result), (int(num_batches), at))

    return after


def _weak(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except TypeError:  # a list has no weak references
        return None


def iteration_begins(loader: Any) -> After:
    """DataLoader.__iter__."""
    at, by_user = places.here(), places.is_by_user(sys._getframe(3))

    def after(result: Any, error: BaseException | None) -> None:
        global _count, last
        if error is not None:
            return
        known = _loaders.get(loader)
        if known is None:
            known = _loaders.put(loader, Loader(_count, None))
            _count += 1
        close_complete()
        recorder.has_loader = True
        recorder.counts.loops += 1
        if known.open is not None:
            close(known.open, is_complete=False)
        is_map_style = not isinstance(loader.dataset, torch.utils.data.IterableDataset)
        rounds = 0 if is_map_style else 2 * loader.num_workers
        known.open = Pass(known, known.epochs, at, dict(vars(recorder.counts)), is_map_style, rounds)
        _open[known.number] = last = known.open
        known.epochs += 1
        early = getattr(result, "_sampler_iter", None)  # workers have drawn indices before this returns
        if isinstance(early, _Drawing):
            known.open.drawn = early.drawn
        _passes.put(result, known.open)
        if known.epochs == 1:
            known.subset, known.mapped = _subset(loader.dataset)
        described = _described(loader, known)
        known.open.due = None if by_user else described["batches"]
        recorder.emit("loader", limit=500, at=at, by_framework=not by_user or None, **described)
        for function in on_loader:
            function(loader, described)

    return after


on_loader: list[Callable[[Any, dict[str, Any]], None]] = []
"""Called with the loader and the event of each iteration that begins."""


def _subset(dataset: Any) -> tuple[str | None, list[int] | None]:
    """Of `Subset`s within each other: a digest of their indices (None: there is none), and indices below all."""
    found, mapped = [], None
    while isinstance(dataset, torch.utils.data.Subset):
        indices = [int(index) for index in dataset.indices]
        found.append(digests.of_numbers(indices))
        mapped = indices if mapped is None else [indices[index] for index in mapped]
        dataset = dataset.dataset
    return (digests.of_numbers(found), mapped) if found else (None, None)


def joining(*_: Any, **__: Any) -> After:
    """Join.__enter__, which DDP.join uses, too."""
    recorder.counts.joined += 1
    return None


class _Drawing:
    """An iterator over a sampler, which keeps what it gave."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner
        self.drawn: deque[Any] = deque(maxlen=10_000)

    def __iter__(self) -> _Drawing:
        return self

    def __next__(self) -> Any:
        drawn = next(self._inner)
        self.drawn.append(drawn)
        return drawn


def iterator_made(iterator: Any, *_: Any, **__: Any) -> After:
    """_BaseDataLoaderIter.__init__ and _reset: the sampler's iterator is exchanged for one that keeps indices."""

    def after(result: Any, error: BaseException | None) -> None:
        if error is None and not isinstance(iterator._sampler_iter, _Drawing):
            iterator._sampler_iter = _Drawing(iterator._sampler_iter)

    return after


def _samplers_in(loader: Any) -> list[Any]:
    """The samplers of a loader, the innermost last."""
    found: list[Any] = []
    inner = _sampler_in(loader)
    while inner is not None and not any(inner is one for one in found):
        found.append(inner)
        inner = _sampler_in(inner)
    return found


def _described(loader: Any, known: Loader) -> dict[str, Any]:
    samplers = _samplers_in(loader)
    inner = samplers[-1] if samplers else None
    shares = [told for told in map(_distribution, samplers) if told]
    distributed = shares[0] if shares else None
    kind = type(inner).__name__ if inner is not None else None
    shuffles = distributed.get("shuffle") if distributed else None
    made = (at for one in reversed(samplers) if _distribution(one) and (at := _sampler_made(one)))
    size = loader.batch_size or next((s.batch_size for s in samplers if hasattr(s, "batch_size")), None)
    mapped = known.mapped if known.epochs == 1 and len(known.mapped or ()) <= _MAPPED else None
    is_twice = sum((told.get("replicas") or 1) > 1 for told in shares) > 1
    drops = loader.drop_last or any(getattr(s, "drop_last", False) for s in samplers)
    replacement = next((bool(s.replacement) for s in samplers if hasattr(s, "replacement")), None)
    shuffles = shuffles if shuffles is not None else _SHUFFLING.get(kind or "")
    told: dict[str, Any] = {"loader": known.number, "made_at": known.made_at, "epoch": known.epochs - 1}
    told |= {"subset": known.subset, "dataset_at": _sampler_made(loader.dataset)}
    told |= {"dataset": type(loader.dataset).__name__, "dataset_size": length_of(loader.dataset), "mapped": mapped}
    told |= {"defined_in": places.file_of(type(loader.dataset)), "shared_twice": is_twice or None}
    told |= {"replacement": replacement, "batches": length_of(loader), "batch_size": size, "drop_last": bool(drops)}
    told |= {"is_iterable": isinstance(loader.dataset, torch.utils.data.IterableDataset), "sampler_kind": kind}
    told |= {"skips": _skips.get(loader)}
    told |= {"num_workers": loader.num_workers, "sampler": None if inner is None else _weak(_samplers.of, inner)}
    told |= {"generators": orders.generators(loader.dataset, loader) if told["is_iterable"] else None}
    told |= {"reordered": _weak(orders.lost, loader.dataset, samplers)}
    return told | {"sampler_at": next(made, None), "shuffles": shuffles, "distributed": distributed}


def _distribution(sampler: Any) -> dict[str, Any] | None:
    """How a sampler shares samples among ranks: torch's DistributedSampler and those like it, Accelerate's shards."""
    names = {"replicas": "num_replicas", "rank": "rank", "shuffle": "shuffle", "epoch": "epoch", "seed": "seed"}
    names |= {"drop_last": "drop_last", "total_size": "total_size"}
    if not hasattr(sampler, "num_replicas"):
        names = {"replicas": "num_processes", "rank": "process_index", "even_batches": "even_batches"}
        names |= {"split_batches": "split_batches"}
        if not hasattr(sampler, "num_processes"):
            names = {"replicas": "world_size", "rank": "rank", "shuffle": "shuffle", "epoch": "epoch", "seed": "seed"}
        if not all(isinstance(getattr(sampler, names[key], None), int) for key in ("replicas", "rank")):
            return None
    told = {key: getattr(sampler, name) for key, name in names.items() if hasattr(sampler, name)}
    return {"kind": type(sampler).__name__} | {k: v for k, v in told.items() if isinstance(v, (bool, int))}


def _sampler_in(thing: Any) -> Any:
    """The sampler that a loader or a sampler draws from. A sampler without a length has no truth value."""
    batches = getattr(thing, "batch_sampler", None)
    found = getattr(thing, "sampler", None) if batches is None else batches
    if found is None and isinstance(thing, torch.utils.data.Sampler):
        return next((one for one in vars(thing).values() if isinstance(one, torch.utils.data.Sampler)), None)
    return found


def watch_made(name: str, module: Any) -> None:
    """Note where the script makes objects of a class: samplers, data sets."""
    base = getattr(module, name)

    def made(kind: Any, *arguments: Any, **named: Any) -> Any:
        outer = super(base, kind).__new__
        one = outer(kind) if outer is object.__new__ else outer(kind, *arguments, **named)
        if places.is_by_user(sys._getframe(1)):
            recorder.guard(f"making of {name}", _weak, _samplers_at.put, one, places.here(sys._getframe(1)))
        return one

    base.__new__ = made


def _sampler_made(sampler: Any) -> list[str | int] | None:
    found: list[str | int] | None = _weak(_samplers_at.get, sampler)
    return found


def length_of(thing: Any) -> int | None:
    """The length of a loader, a data set or an array. None: it has none."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def batch_asked(iterator: Any) -> After:
    """_BaseDataLoaderIter.__next__."""
    turn = _passes.get(iterator)
    if turn is None or turn.is_closed:
        return None
    is_by_user = places.is_by_user(sys._getframe(3))

    def after(batch: Any, error: BaseException | None) -> None:
        if error is None:
            _give(turn, batch)
        elif isinstance(error, StopIteration) and is_by_user:
            close(turn, is_complete=True)
        elif isinstance(error, StopIteration):  # a framework draws ahead of what it uses
            turn.is_complete = True

    return after


def _give(turn: Pass, batch: Any) -> None:
    number = turn.batches
    recorder.progress()
    first = next(digests.tensors_in(batch), None)
    samples = int(first.shape[0]) if first is not None and first.ndim else length_of(batch) or 1
    turn.batches += 1
    turn.samples += samples
    turn.is_complete |= turn.batches == turn.due
    told: dict[str, Any] = {"loader": turn.loader.number, "batch": number, "samples": samples}
    if turn.is_map_style and turn.drawn:
        _keep_indices(turn, turn.drawn.popleft())
    if recorder.is_sampled(number) or number < turn.rounds:
        told |= _labels(batch)
        each = digests.of_batch(batch)
        digest = digests.of_numbers(each)
        recorder.emit("batch", epoch=turn.epoch, digest=digest, digests=each[:20], **told)
    elif recorder.is_sampled(recorder.counts.optimizer_steps):
        told |= _labels(batch)
    if len(given) < _MOST_GIVEN:
        given.append((turn, told))
    else:
        recorder.cut["micro_batches"] += 1


def _labels(batch: Any) -> dict[str, int]:
    """The number of labels that are not -100, if any is, and without the first of each row as causal models count."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    for tensor in digests.tensors_in(batch):
        if tensor.dtype == torch.int64 and tensor.device.type == "cpu":
            counts = tensor != IGNORED
            shifted = {"shifted": int(counts[..., 1:].sum())} if tensor.ndim > 1 else {}
            if not bool(counts.all()):
                return {"valid": int(counts.sum())} | shifted
            if tensor is labels:
                return shifted
    return {}


def _keep_indices(turn: Pass, drawn: Any) -> None:
    if turn.written > _INDICES:
        recorder.cut["indices"] += 1
        return
    try:
        indices = [int(index) for index in (drawn if isinstance(drawn, (list, tuple)) else [drawn])]
    except (TypeError, ValueError):
        return
    turn.unwritten.append(indices)
    turn.written += len(indices)
    if len(turn.unwritten) >= _EACH:
        _write_indices(turn)


def _write_indices(turn: Pass) -> None:
    if turn.unwritten:
        told: dict[str, Any] = {"first": turn.first_unwritten, "batches": turn.unwritten}
        recorder.emit("indices", loader=turn.loader.number, epoch=turn.epoch, **told)
        turn.first_unwritten, turn.unwritten = turn.first_unwritten + len(turn.unwritten), []


def close(turn: Pass, is_complete: bool) -> None:
    """Note the end of an iteration."""
    if turn.is_closed:
        return
    turn.is_closed = True
    turn.loader.open = None
    _open.pop(turn.loader.number, None)
    _write_indices(turn)
    done = {name: value - turn.before[name] for name, value in vars(recorder.counts).items()}
    if not done["backwards"]:  # no training: its batches belong to no optimizer step
        given[:] = [pair for pair in given if pair[0] is not turn]
    event: dict[str, Any] = {"at": turn.at, "loader": turn.loader.number, "epoch": turn.epoch, "batches": turn.batches}
    event |= {"samples": turn.samples, "is_complete": is_complete}
    event |= {**done, "gathered": done["gathered"] > 0, "joined": recorder.counts.joined > 0}
    recorder.emit("loader_end", limit=500, **event)


def close_complete() -> None:
    """Note the end of iterations that gave all batches, and of evaluations that a framework left early."""
    for turn in list(_open.values()):
        if turn.is_complete or (turn.due is not None and _is_evaluation(turn)):
            close(turn, is_complete=turn.is_complete)


def _is_evaluation(turn: Pass) -> bool:
    """True if since the begin of an iteration a model was called in evaluations only."""
    called = {name: getattr(recorder.counts, name) - turn.before[name] for name in _CALLS}
    return bool(called["forwards_eval"]) and not called["forwards_training"] and not called["backwards"]


def at_exit() -> dict[str, Any]:
    """Close what is open."""
    close_complete()
    for turn in list(_open.values()):
        close(turn, is_complete=False)
    return {}


def epoch_set(sampler: Any, epoch: Any) -> After:
    """DistributedSampler.set_epoch."""
    recorder.emit("set_epoch", limit=2000, at=places.here(), sampler=_samplers.of(sampler), epoch=int(epoch))
    return None
