"""Observes data: loaders, and the batches that the script receives."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lockstep_audit.observe import digests, orders, places, samplers
from lockstep_audit.observe.objects import Registry
from lockstep_audit.observe.recorder import After, recorder

_INDICES = 100_000
_EACH = 50
_MOST_GIVEN = 256
IGNORED = -100
"""The label that torch's losses ignore."""
_MAPPED = 20_000
_CALLS = ("forwards_eval", "forwards_training", "backwards")


@dataclasses.dataclass
class ObservedLoader:
    """What is known of a DataLoader."""

    number: int
    made_at: list[str | int] | None
    subset: str | None = None
    mapped: list[int] | None = None
    """For a Subset: the index below for each of its indices."""
    epochs: int = 0
    open: Pass | None = None


@dataclasses.dataclass
class Pass:
    """An iteration over a DataLoader."""

    loader: ObservedLoader
    epoch: int
    at: list[str | int] | None
    before: dict[str, int]
    is_map_style: bool
    rounds: int = 0
    """The number of first batches that are examined: two of each worker of a stream."""
    drawn: deque[Any] = dataclasses.field(default_factory=deque)
    unwritten: list[list[int]] = dataclasses.field(default_factory=list)
    first_unwritten: int = 0
    written: int = 0
    due: int | None = None
    """The number of batches after which a framework stops asking. None: the script itself asks, or it is unknown."""
    batches: int = 0
    samples: int = 0
    is_complete: bool = False
    is_closed: bool = False


_loaders: Registry[ObservedLoader] = Registry()
_passes: Registry[Pass] = Registry()
_open: dict[int, Pass] = {}
"""Iterations that have not ended, by the number of their loader. The loader may be gone before the script ends."""
_made_for: Registry[list[str | int] | None] = Registry()
_skips: Registry[tuple[int, list[str | int] | None]] = Registry()
"""For loaders that skip their first batches: how many, and where the script asked for it."""
_count = 0
last: Pass | None = None
"""The iteration that began last."""
given: list[tuple[Pass, dict[str, Any]]] = []
"""Batches since the last optimizer step."""


def loader_made(loader: Any, dataset: Any, *_: Any, **named: Any) -> After:
    """DataLoader.__init__. If a framework rebuilds a loader, its place is that of the user's loader of these data."""
    at, by_user = places.here(), places.is_by_user(sys._getframe(3))

    def after(result: Any, error: BaseException | None) -> None:
        global _count
        if error is None:
            known = loader_at(dataset)
            made_at = at if by_user or known is None else known
            if by_user:
                samplers.weak(_made_for.put, dataset, at)
                samplers.weak(orders.chosen, dataset, samplers.within(loader), named.get("sampler"), samplers.made_at)
            _loaders.put(loader, ObservedLoader(_count, made_at))
            _count += 1

    return after


def loader_at(dataset: Any) -> list[str | int] | None:
    """Where the script made the loader of a data set, or the data set if it made no loader."""
    found: list[str | int] | None = samplers.weak(_made_for.get, dataset)
    return found or samplers.made_at(dataset)


def first_skipped(loader: Any, num_batches: int = 0) -> After:
    """skip_first_batches of Accelerate."""
    at = places.here()

    def after(result: Any, error: BaseException | None) -> None:
        if error is None and num_batches:
            _skips.put(getattr(result, "base_dataloader", result), (int(num_batches), at))

    return after


def iteration_begins(loader: Any) -> After:
    """DataLoader.__iter__."""
    at, by_user = places.here(), places.is_by_user(sys._getframe(3))

    def after(result: Any, error: BaseException | None) -> None:
        global _count, last
        if error is not None:
            return
        known = _loaders.get(loader)
        if known is None:
            known = _loaders.put(loader, ObservedLoader(_count, None))
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
    """Of nested `Subset`s: a digest of their indices (None: there is no Subset), and the indices below all of them."""
    found, mapped = [], None
    while isinstance(dataset, torch.utils.data.Subset):
        indices = [int(index) for index in dataset.indices]
        found.append(digests.of_numbers(indices))
        mapped = indices if mapped is None else [indices[index] for index in mapped]
        dataset = dataset.dataset
    return (digests.of_numbers(found), mapped) if found else (None, None)


def joining(*_: Any, **__: Any) -> After:
    """Join.__enter__, which DDP.join also uses."""
    recorder.counts.joined += 1
    recorder.emit("join", limit=8, at=places.here())
    return None


class _Drawing:
    """An iterator over a sampler that records what it yields."""

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
    """_BaseDataLoaderIter.__init__ and _reset: replace the sampler's iterator by one that records indices."""

    def after(result: Any, error: BaseException | None) -> None:
        if error is None and not isinstance(iterator._sampler_iter, _Drawing):
            iterator._sampler_iter = _Drawing(iterator._sampler_iter)

    return after


def _described(loader: Any, known: ObservedLoader) -> dict[str, Any]:
    found, dataset = samplers.within(loader), loader.dataset
    is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
    mapped = known.mapped if known.epochs == 1 and len(known.mapped or ()) <= _MAPPED else None
    told: dict[str, Any] = {"loader": known.number, "made_at": known.made_at, "epoch": known.epochs - 1}
    told |= {"subset": known.subset, "mapped": mapped, "dataset_at": samplers.made_at(dataset)}
    told |= {"dataset": type(dataset).__name__, "dataset_size": samplers.length_of(dataset)}
    told |= {"defined_in": places.file_of(type(dataset)), "is_iterable": is_stream, "skips": _skips.get(loader)}
    told |= {"batches": samplers.length_of(loader), "num_workers": loader.num_workers}
    told |= {"generators": orders.generators(dataset, loader) if is_stream else None}
    told |= {"reordered": samplers.weak(orders.lost, dataset, found)}
    return told | samplers.described(loader, found)


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
    samples = int(first.shape[0]) if first is not None and first.ndim else samplers.length_of(batch) or 1
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
        elements = max((tensor.numel() for tensor in digests.tensors_in(batch)), default=0)
        recorder.emit("batch", epoch=turn.epoch, digest=digest, digests=each[:20], elements=elements, **told)
    elif recorder.is_sampled(recorder.counts.optimizer_steps):
        told |= _labels(batch)
    if len(given) < _MOST_GIVEN:
        given.append((turn, told))
    else:
        recorder.cut["micro_batches"] += 1


def _labels(batch: Any) -> dict[str, int]:
    """The number of labels that are not -100, if any is, and without the first of each row, as causal models count."""
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
    """Record the end of an iteration."""
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
    """Record the end of iterations that yielded all batches, and of evaluations that a framework left early."""
    for turn in list(_open.values()):
        if turn.is_complete or (turn.due is not None and _is_evaluation(turn)):
            close(turn, is_complete=turn.is_complete)


def _is_evaluation(turn: Pass) -> bool:
    """True if, since an iteration began, a model was called only for evaluation."""
    called = {name: getattr(recorder.counts, name) - turn.before[name] for name in _CALLS}
    return bool(called["forwards_eval"]) and not called["forwards_training"] and not called["backwards"]


def at_exit() -> dict[str, Any]:
    """Close all open iterations."""
    close_complete()
    for turn in list(_open.values()):
        close(turn, is_complete=False)
    return {}
