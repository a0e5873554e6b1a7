"""Observes calls that choose samples of a data set: a choice that differs by rank is a fault."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

from lockstep_audit.observe import digests, places, samplers
from lockstep_audit.observe.recorder import After, recorder

_COMPARED, _EACH_LINE = 1000, 20
_ordered: Counter[str] = Counter()
"""How often each line has drawn an order."""


def splitted(*_: Any, **__: Any) -> After:
    """torch.utils.data.random_split."""
    at = places.here()

    def after(subsets: Any, error: BaseException | None) -> None:
        if error is None:
            digest = digests.of_numbers(tuple(map(int, subset.indices)) for subset in subsets)
            recorder.emit("split", limit=20, at=at, lengths=[len(subset) for subset in subsets], digest=digest)

    return after


def ordered(given: Any = None, *_: Any, **__: Any) -> After:
    """numpy.random.permutation, torch.randperm, shuffle and the like, by the script."""
    if not places.is_by_user(sys._getframe(3)):
        return None
    at = places.here()
    if _ordered[str(at)] >= _EACH_LINE:  # a training step may draw orders, too
        return None
    _ordered[str(at)] += 1

    def after(result: Any, error: BaseException | None) -> None:
        order = given if result is None else result
        on_device = getattr(getattr(order, "device", None), "type", "cpu") != "cpu"
        if error is None and not on_device and getattr(order, "ndim", 1) == 1 and hasattr(order, "__len__"):
            first = order[:_COMPARED]
            first = first.tolist() if hasattr(first, "tolist") else first
            if all(isinstance(each, (int, float, str)) for each in first):
                digest = digests.of_numbers(map(str, first))
                recorder.emit("order", at=at, length=len(order), digest=digest)

    return after


def subset_made(subset: Any, dataset: Any, indices: Any, *_: Any, **__: Any) -> None:
    """Subset.__init__, by the script."""
    if places.is_by_user(sys._getframe(3)):
        _chosen("Subset", indices)


def selected(dataset: Any, indices: Any, *_: Any, **__: Any) -> None:
    """Dataset.select of the library datasets; its shuffle, shard and train_test_split call it."""
    names = ["select"]
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and places.kind_of(frame.f_code)[0] is places.OTHER:
        names += [name] if (name := frame.f_code.co_name) != "wrapper" else []
        frame = frame.f_back
    _chosen(names[-1], indices)


def _chosen(by: str, indices: Any) -> None:
    if hasattr(indices, "__getitem__"):
        digest = digests.of_numbers(map(int, indices[:_COMPARED]))
        recorder.emit("split", limit=20, at=places.here(), by=by, lengths=[len(indices)], digest=digest)


def arrays_split(*_: Any, random_state: Any = None, shuffle: bool = True, **__: Any) -> After:
    """sklearn's train_test_split: the state of its generator decides which samples it draws."""
    at, state = places.here(), random_state
    if state is None or hasattr(state, "get_state"):
        _, *state = (sys.modules["numpy"].random if state is None else state).get_state(legacy=True)
        state = (state[0].tolist(), *state[1:])

    def after(arrays: Any, error: BaseException | None) -> None:
        if error is None:
            lengths = [samplers.length_of(array) for array in arrays[:2]]
            digest = digests.of_numbers([state if shuffle else None])
            recorder.emit("split", limit=20, at=at, by="train_test_split", lengths=lengths, digest=digest)

    return after
