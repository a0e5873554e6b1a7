"""A reader of a stream: returns the sample at a position, and keeps marks from which reading can restart."""

from __future__ import annotations

import collections
import copy
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.core.checkpoint import nested
from lockstep.core.data.fingerprint import digest_of
from lockstep.core.data.order import derive_seed
from lockstep.core.data.randomness import seed_all
from lockstep.core.errors import DataError, LockstepError, TrainingError, UsageError, frame_of_task, number_of
from lockstep.streams.torch_private import outside_workers

WHERE = "the stream of the training data"
_READ = 0x57AEA  # part of the seeds of reading, so that they differ from the seeds of samples
_NOWHERE = 1 << 62
_NEVER_CHANGE = frozenset((int, float, bool, complex, str, bytes, type(None)))
_MOST_KEPT = 1 << 16  # maximum number of read samples to keep for reading again


@dataclass(frozen=True)
class Mark:
    """A position of a stream from which reading can start."""

    position: int
    """Samples before it, over all passes."""
    number: int
    """The pass over the source, from 0."""
    within: int
    """Samples of this pass before it."""
    state: Any
    """What `state_dict` of the source returned there. None: the pass is read from its start."""
    digest: str
    """Digest of the next sample. Empty: it is not compared."""


class Reader:
    """The samples of a source by position, in ascending order. To go back, it reads again from a mark.

    Before each sample, the global generators are seeded by its position, so that all readers of a stream get the same
    samples, wherever they started.

    Args:
        source: see `Stream`.
        length: the number of samples of a pass. None: unknown.
        every: the number of samples between two marks.
    """

    def __init__(self, source: Any, length: int | None, every: int) -> None:
        self.source = source if _is_function(source) else _copied(source)  # as it was given
        self.length, self.every = length, every
        self.marks = [Mark(0, 0, 0, None, "")]
        self.new: list[Mark] = []
        """Marks made since they were last collected."""
        self.position, self.number, self.within = (
            _NOWHERE,
            0,
            0,
        )  # of the next sample; `_NOWHERE`: the stream must be opened
        self._opened: Any = None  # a copy of the source
        self._iterator: Iterator[Any] = iter(())
        self._recent: collections.deque[Any] = collections.deque(maxlen=0)  # the samples before `position`
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """Workers get a reader that has not started: iterators cannot be pickled, and files are not shared."""
        closed: dict[str, Any] = {
            "position": _NOWHERE,
            "_opened": None,
            "_iterator": iter(()),
            "_recent": collections.deque(maxlen=0),
        }
        return self.__dict__ | closed

    def read(self, index: int) -> Any:
        """The sample at a position.

        Raises:
            DataError: the stream has changed, or does not match its length.
            TrainingError: its code failed.
        """
        if self._process != os.getpid():  # a forked worker shares the open files of its parent
            self._process, self.position = os.getpid(), _NOWHERE
        back = self.position - index
        if self._keeps and self.position != _NOWHERE and 0 < back <= len(self._recent):
            return own_copy(self._recent[-back])
        nearest = max((mark for mark in self.marks if mark.position <= index), key=lambda mark: mark.position)
        if back > 0 or (nearest.position > self.position and nearest.state is not None):
            if back > 0 and self.position != _NOWHERE:
                self._keep(back)
            self._open(nearest)
        try:
            while True:
                sample = self._next()
                if self.position > index:  # the caller or the source may change a sample in place
                    return own_copy(sample)
        except BaseException as error:
            at, self.position = self.position, _NOWHERE  # the state after a failure is unknown
            if isinstance(error, LockstepError) or not isinstance(error, Exception):
                raise
            frame = frame_of_task(error)
            what = f"the stream failed at sample {at:,}: {type(error).__name__}: {error}"
            remedy = (
                "correct the source, or catch the error there and continue with the next sample: data.on_error=skip "
            )
            remedy += "only skips errors of Task.prepare, not of a stream"
            raise TrainingError(what, where=f"{frame.filename}:{frame.lineno}", remedy=remedy) from error

    @property
    def _keeps(self) -> bool:
        """True if samples are kept for reading again."""
        return bool(self._recent.maxlen)

    def _keep(self, back: int) -> None:
        """Keep this many samples from now on, because they are read again."""
        wanted = min(2 * back, _MOST_KEPT)
        if wanted > (self._recent.maxlen or 0):
            self._recent = collections.deque(maxlen=wanted)

    def _open(self, mark: Mark) -> None:
        """Start at a mark. Without a state, start at the first sample of its pass."""
        self._recent.clear()
        self.number = mark.number
        self.position, self.within = mark.position, mark.within
        if mark.state is None:
            self.position, self.within = mark.position - mark.within, 0
        self._begin_pass(mark.state)

    def _begin_pass(self, state: Any = None) -> None:
        with outside_workers():
            self._opened = self.source() if _is_function(self.source) else _copied(self.source)
            if hasattr(self._opened, "set_epoch"):
                self._opened.set_epoch(self.number)
            if state is not None:
                self._opened.load_state_dict(copy.deepcopy(state))
            seed_all(derive_seed(_READ, self.number))
            self._iterator = iter(self._opened)

    def _next(self) -> Any:
        """The sample at `position`, which is then incremented."""
        while True:
            state, marks = None, self.position and self.position % self.every == 0
            if marks and has_state(self._opened):
                state = self._state()
            seed_all(derive_seed(_READ, self.number, self.within))
            try:
                with outside_workers():
                    sample = next(self._iterator)
            except StopIteration:
                self._end_pass()
                continue
            if self.within == self.length:
                raise self._wrong_length(f"more than {number_of(self.length, 'sample')}")
            if not self._is_expected(sample):
                continue
            if marks or not self.within:
                self._add(Mark(self.position, self.number, self.within, state, digest_of(sample)))
            self.position, self.within = self.position + 1, self.within + 1
            if self._keeps:
                self._recent.append(own_copy(sample))
            return sample

    def _state(self) -> Any:
        try:
            state = copy.deepcopy(self._opened.state_dict())
            nested.encode(state)
            return state
        except nested.NotSavedError as error:
            remedy = "return numbers, texts, bytes, tensors, and nested lists, tuples, sets and dicts of these"
            where = f"state_dict of {type(self._opened).__name__}"
            raise DataError(f"the state cannot be saved: {error}", where=where, remedy=remedy) from error

    def _end_pass(self) -> None:
        if self.within != self.length and (self.length is not None or not self.within):
            raise self._wrong_length(number_of(self.within, "sample") if self.within else "no samples")
        self.number, self.within = self.number + 1, 0
        self._begin_pass()

    def _wrong_length(self, found: str) -> DataError:
        said = "" if self.length is None else f", but its length is given as {self.length:,}"
        what = f"pass {self.number + 1} has {found}{said}"
        remedy = "give an iterable that restarts with each iter()" if found == "no samples" else "correct `length`"
        return DataError(what, where=WHERE, remedy=f"{remedy}, or remove `length` and set train.steps")

    def _is_expected(self, sample: Any) -> bool:
        """False if a state leads to a different sample than the one it was saved before: the pass then restarts.

        Raises:
            DataError: when read from its start, the pass also has a different sample there.
        """
        known = next((mark for mark in self.marks if mark.position == self.position and mark.digest), None)
        if known is None or digest_of(sample) == known.digest:
            return True
        at = f"sample {self.position:,} (sample {self.within:,} of pass {self.number + 1})"
        if known.state is None:
            remedy = "make the stream repeatable, including state_dict and load_state_dict; or start again with --fresh"
            raise DataError(f"{at} differs from the sample when the state was saved", where=WHERE, remedy=remedy)
        worker = torch.utils.data.get_worker_info()
        if worker is None or worker.id == 0:
            text = f"note: a saved state of the stream does not lead to {at}, where it was saved (a buffer that is not"
            text += f" part of the state?); this start reads {number_of(self.within, 'sample')} of this pass again"
            print(text, file=sys.stderr, flush=True)
        without = Mark(known.position, known.number, known.within, None, known.digest)
        self.marks = [without if mark is known else mark for mark in self.marks]
        self._open(without)
        for _ in range(without.within):
            self._next()
        return False

    def _add(self, mark: Mark) -> None:
        if all(mark.position != other.position for other in self.marks):
            before = [other for other in self.marks[1:] if other.position < mark.position]
            ahead = [other for other in self.marks if other.position > mark.position]  # to be compared
            self.marks = [self.marks[0], *before[-1:], mark, *ahead]
            self.new.append(mark)


def own_copy(sample: Any) -> Any:
    """A copy of a sample: a source may reuse the same arrays, or the same dict, for each sample."""
    kind = type(sample)
    if kind in _NEVER_CHANGE:
        return sample
    if kind is dict:
        return {key: own_copy(value) for key, value in sample.items()}
    if kind is list or kind is tuple:
        return kind(map(own_copy, sample))
    if kind is torch.Tensor and not sample.requires_grad:
        return sample.clone()
    try:
        return copy.deepcopy(sample)
    except Exception:  # such as an open file, which is not reused
        return sample


def has_state(source: Any) -> bool:
    """True if a source can save its position and restart from it."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _is_function(source: Any) -> bool:
    return not hasattr(source, "__iter__")


def _copied(source: Any) -> Any:
    """A copy, so that each pass starts with the unchanged source.

    Raises:
        UsageError: it cannot be copied.
    """
    try:
        return copy.deepcopy(source)
    except Exception as error:  # such as a lock, an open file, or a generator in it
        what = (
            f"a {type(source).__name__} cannot be copied ({type(error).__name__}: {error}), but each pass needs a copy"
        )
        remedy = "give a function that makes it: lockstep.Stream(lambda: MySource(...)); or open files in __iter__"
        raise UsageError(what, where="Stream(samples)", remedy=remedy) from error
