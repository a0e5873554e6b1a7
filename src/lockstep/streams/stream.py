"""`Stream`: an iterable of samples as training data, for any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from lockstep.core import keywords
from lockstep.core.build import Run
from lockstep.core.config.sections import RunConfig
from lockstep.core.data import private_generators
from lockstep.core.data.order import Indices
from lockstep.core.data.randomness import restored_generators
from lockstep.core.errors import UsageError, number_of
from lockstep.core.part import Part, Training
from lockstep.streams.reader import Mark, Reader, has_state

_ENDLESS = 1 << 50  # samples: more than any run uses, and exact as a float
_EVERY = 1000
_CPU = torch.device("cpu")


class InTurn:
    """The order of a stream: sample 0, 1, 2, ... of all passes."""

    def __init__(self, length: int | None) -> None:
        self.length, self.digest = length or _ENDLESS, f"a stream of {length}"

    def __call__(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        return positions + epoch * self.length


@keywords.of_class
class Stream(Dataset[Any]):
    """Training data that is read sequentially: `return lockstep.Stream(samples)` in `Task.train_data`.

    Step t uses the samples t·G to t·G + G - 1 of the stream, for a global batch of G, whatever the number of ranks.
    Each rank and each of its workers reads the whole stream, but prepares and processes only its own samples. So decode
    in `Task.prepare`, which only gets the samples of its rank, not in the stream, and do not divide the stream among
    ranks or workers. When the source ends, it restarts (a new pass).

    A checkpoint contains the position in the stream. A resumed run starts at the last state before this position, if
    the source has `state_dict()` and `load_state_dict(state)`, as torchdata defines them; otherwise it reads the pass
    again from its start. Either way it checks that the sample there is the same. `set_epoch(pass)` is called at the
    start of each pass, if the source has it.

    Args:
        samples: an iterable that restarts with each `iter()`, such as an `IterableDataset`; or a function without
            arguments that returns an iterable or an iterator. Each pass reads a copy (`copy.deepcopy`) of it.
        length: the number of samples of a pass, if known. An epoch is then a pass. None: there are no epochs, and the
            config needs `train.steps`.
        state_every: the number of samples between two saved states.

    Raises:
        UsageError: the samples cannot be read twice, or the length is not a number of samples.
    """

    reads_forward = True
    """It can only be read by ascending positions, not by index."""
    compared = (0, 1, 2)
    """The samples that a run compares over ranks, and with an earlier start."""

    def __init__(
        self,
        samples: Iterable[Any] | Callable[[], Iterable[Any]],
        length: int | None = None,
        *,
        state_every: int = _EVERY,
    ) -> None:
        if not callable(samples) and not hasattr(samples, "__iter__"):
            what = f"it is of the type {type(samples).__name__}"
            raise UsageError(what, where="Stream(samples)", remedy="give an iterable, or a function that returns one")
        if hasattr(samples, "__next__"):
            remedy = "give the function that makes it: lockstep.Stream(read) instead of lockstep.Stream(read())"
            raise UsageError("an iterator can be read only once", where="Stream(samples)", remedy=remedy)
        for name, value in (("length", length), ("state_every", state_every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"it is {value!r}", where=f"Stream({name})", remedy="give a number of samples")
        self.order = InTurn(length)
        """The order of the samples of an epoch; see `core.data.order.Order`."""
        self.length = length
        if kept := private_generators.kept_for(getattr(type(samples), "__iter__", samples)):
            what = f"it uses the generator {kept}, which passes, workers and the task share"
            remedy = "make the generator in the function, or give an iterable that holds it: each pass reads a copy"
            raise UsageError(what, where="Stream(samples)", remedy=remedy)
        self.reader = Reader(samples, length, state_every)
        self._ahead: dict[int, Any] = {}
        self.marks: list[Mark] = []
        """Marks that micro-batches of this rank have passed, the oldest first."""

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Any:
        if index in self._ahead:
            return self._ahead.pop(index)  # once: `prepare` may change a sample in place
        with restored_generators(_CPU):  # reading has its own seeds; `prepare` draws as if nothing had been read
            return self.reader.read(index)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Read the samples of a micro-batch. Restoring the generators takes ten times as long as reading one."""
        self._ahead.clear()
        with (
            contextlib.suppress(Exception),
            restored_generators(_CPU),
        ):  # the caller that requests the sample gets its error
            for index in indices:
                self._ahead[index] = self.reader.read(index)

    def where(self, index: int) -> str:
        """The name of a sample, for errors."""
        at = f", sample {index % self.length} of pass {index // self.length + 1}" if self.length else ""
        return f"Stream[{index}]{at}"

    def take_places(self) -> Sequence[Mark]:
        """The marks that reading has passed since the last call. Called after reading a micro-batch."""
        taken, self.reader.new = self.reader.new, []
        return taken

    def passed(self, marks: Sequence[Mark]) -> None:
        """Micro-batches with these marks have arrived in the process that trains."""
        self.marks += marks

    def newest_mark(self, position: int) -> Mark:
        """The last known mark up to a position. Older marks are dropped."""
        known = sorted([*self.reader.marks[:1], *self.marks], key=lambda mark: mark.position)
        found = [mark for mark in known if mark.position <= position][-1]
        self.marks = [mark for mark in known if mark.position >= found.position]
        return found

    def begin_at(self, mark: Mark) -> None:
        """The next sample is at or after a mark."""
        self.reader.marks = [*self.reader.marks[:1], mark] if mark.position else self.reader.marks
        self.marks = [mark]

    def lines(self) -> list[str]:
        """Lines for the head of the log."""
        epochs = "no epochs" if self.length is None else f"an epoch is a pass of {number_of(self.length, 'sample')}"
        resume = "a resumed run reads from the last state before its position"
        if not has_state(self.reader.source):
            resume = "without state_dict and load_state_dict, a resumed run reads the pass again from its "
            resume += "start, and ends with an error if the stream is not repeatable"
        return [f"stream: {epochs}; every rank and worker reads all samples; {resume}"]


class StreamPlace(Part):
    """The position in a stream, in every checkpoint.

    Args:
        first_of: the position of the first sample of a step.
    """

    name = "stream"

    def __init__(self, stream: Stream, first_of: Callable[[int], int]) -> None:
        self.stream, self.first_of = stream, first_of
        self.mark = stream.newest_mark(0)
        self.next: int | None = None
        """The position of the next sample when the state was saved. None: nothing was saved."""

    def start(self, training: Training) -> None:
        now = self.first_of(training.step)
        if self.next is not None and now != self.next:
            what = "are used again" if now < self.next else "are skipped"
            first, last = sorted((now, self.next))
            text = f"warning: the global batch has changed, so samples {first:,} to {last - 1:,} of the stream {what}"
            training.tell(text)

    def before_save(self, training: Training) -> None:
        self.next = self.first_of(training.step)
        own = self.stream.newest_mark(self.next)
        self.mark = max(training.gather(own), key=lambda mark: mark.position)

    def state_dict(self) -> Any:
        return {"next": self.next, **vars(self.mark)}

    def load_state_dict(self, state: Any) -> None:
        self.next = state.pop("next")
        self.mark = Mark(**state)
        self.stream.begin_at(self.mark)


def check(config: RunConfig, stream: Stream) -> None:
    """Raise UsageError if the run needs epochs, but the stream has none."""
    if stream.length is None and not config.train.steps:
        remedy = (
            "set train.steps and train.eval_every_steps, or give the number of samples of a pass: Stream(samples, "
            "length)"
        )
        raise UsageError("a stream of unknown length has no epochs", where="train.epochs", remedy=remedy)
    if config.data.balance is not None or config.data.samples_per_epoch is not None:
        key = "data.balance" if config.data.balance is not None else "data.samples_per_epoch"
        raise UsageError("samples of a stream cannot be drawn by weights", where=key, remedy="remove it")


def part_of(run: Run) -> list[Part]:
    """The Part that saves the position in a stream, if the training data is a stream."""
    data, plan = run.batches.loader.micro_batches.data, run.plan
    return [StreamPlace(data, lambda step: int(plan.indices(step)[0].min()))] if isinstance(data, Stream) else []


def lines(run: Run) -> list[str]:
    """Lines for the head of the log, if the training data is a stream."""
    data = run.batches.loader.micro_batches.data
    return data.lines() if isinstance(data, Stream) else []
