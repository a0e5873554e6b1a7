"""The Parts of a training: calls them at their events, handles their requests, and keeps their states.

All ranks call each method after the same step. A method that no Part needs costs nothing.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.built_in import BuiltInPart, Inside
from lockstep.core.checkpoint import nested
from lockstep.core.code_files import LOCKSTEP, library_of
from lockstep.core.data.loader import MicroBatch
from lockstep.core.errors import LockstepError, TrainingError, UsageError, frame_of_task
from lockstep.core.log_window import LogWindow
from lockstep.core.optimizer_class import fused_on_cpu, match_strides
from lockstep.core.parallel.sharded_tensor import local
from lockstep.core.parallel.world import World
from lockstep.core.part import EVENTS, Part, Training, label, overrides
from lockstep.core.part_changes import PartChanges
from lockstep.core.step import TrainState
from lockstep.core.task_checks import line_of

_OF_ENTRIES = ("log_entry", "after_evaluation", "end")


class _Lines:
    """Lines of the Parts for people. In events of an entry of the log, they wait until the entry is written."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell, self.waits = tell, False
        self.waiting: list[str] = []

    def __call__(self, text: str) -> None:
        if self.waits:
            self.waiting.append(text)
        else:
            self.tell(text)

    @contextlib.contextmanager
    def after_entry(self) -> Generator[None, None, None]:
        """An entry is written inside: what Parts say while it is made follows it."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False
            while self.waiting:
                self.tell(self.waiting.pop(0))


class JoinedParts:
    """The Parts of a training on this rank.

    Args:
        parts: the user's, in the order in which they are called.
        built_in: Lockstep's own. They are called before the user's, and no checkpoint has states of them.
        window: collects the steps for the log.
        tell: writes a line for people into the logs.
        last_step, steps_per_epoch, folder: see `Training`.

    Raises:
        UsageError: two Parts have the same name, or an object is not a Part.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        state: TrainState,
        window: LogWindow,
        *,
        last_step: int,
        steps_per_epoch: int,
        built_in: Sequence[BuiltInPart] = (),
        folder: Path = Path(),
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        check(parts)
        self.state, self.window, self.built_in = state, window, built_in
        self.lines = _Lines(tell)
        self.by_name = {label(part): part for part in parts}
        """The user's Parts."""
        self._all: dict[str, Part] = {f"Lockstep's {label(part)}": part for part in built_in} | self.by_name
        self.results: dict[str, float] = {}
        """The last value of everything logged. The log adds to it."""
        self.ended: tuple[str, str] | None = None
        """The Part that ended the training, and its reason: the same on all ranks."""
        self.left_out: set[str] = set()
        """Parts that failed on this rank."""
        self.unsaved: set[str] = set()
        """Parts whose states the ranks do not save, because they differ. The same on all ranks."""
        self.has_started = False
        self.writes: dict[str, str] = {}
        """By name of a user's Part that has written weights on this rank: the first of them, and the event."""
        self._sees_writes = any(part.sees_writes for part in built_in)
        self._needs = {event: [name for name, part in self._all.items() if overrides(part, event)] for event in EVENTS}
        self._figures: dict[str, float] = {}  # that the next entry of the log takes
        seen: dict[str, Any] = {
            "model": state.strategy.unwrapped.model,
            "optimizer": state.optimizer,
            "rank": state.world.rank,
            "ranks": state.world.size,
            "is_sharded": state.strategy.is_sharded,
            "last_step": last_step,
            "steps_per_epoch": steps_per_epoch,
            "folder": folder,
            "results": MappingProxyType(self.results),
            "step": state.step,
            "_tell": self.lines,
            "_gradients": partial(_gradients, state.strategy.unwrapped.model),
        }
        gather = partial(_gathered, state.world)
        own, writes = tuple(self.by_name), self.writes
        self._inside = [
            Inside(**seen, _gather=gather, state=state, window=window, parts=own, writes=writes) for _ in built_in
        ]
        of_users = [Training(**seen, _gather=gather if part.required else None) for part in self.by_name.values()]
        self._trainings = dict(zip(self._all, [*self._inside, *of_users], strict=True))

    # ---- events

    def start(self) -> None:
        """Before the first step of this start. If a Part needs gradients, the optimizer calls `before_update`."""
        if not self.has_started:
            self.has_started = True
            self.call("start")
            if self._needs["before_update"]:
                parts = weakref.ref(self)  # a cycle would be freed late, and with it the memory of the model
                self.state.optimizer.register_step_pre_hook(lambda *_: _before_update(parts()))

    def call(self, event: str) -> None:
        """Call the Parts that need an event, in their order.

        Raises:
            TrainingError: a required Part failed; names the Part, the event, the step, the rank, the file and the line.
        """
        for name in tuple(self._needs[event]):
            part, training = self._all[name], self._trainings[name]
            if isinstance(training, Inside):
                training.step = self.state.step
                getattr(part, event)(training)
                for left in training.left:
                    self._needs[left].remove(name)
                training.left.clear()
            else:
                self._attempt(name, event, training)
            if event in _OF_ENTRIES:
                self._take(self._trainings[name])  # a later Part sees the results of this event

    def before_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """A step begins, of these micro-batches on this rank."""
        for inside in self._inside:
            inside.micro_batches = micro_batches
        self.call("before_step")

    @contextlib.contextmanager
    def apart(self, what: str) -> Generator[None, None, None]:
        """Inside is an `evaluation`, or `saving`: Lockstep's own Parts do not count it as training."""
        with contextlib.ExitStack() as stack:
            for part in self.built_in if self.has_started else ():
                stack.enter_context(part.apart(what))
            yield

    def set_last_step(self, step: int) -> None:
        """Inform the Parts that the training ends at a different step."""
        for training in self._trainings.values():
            training.last_step = step

    def _attempt(self, name: str, method: str, *arguments: Any) -> Any:
        """The value that a method of a Part returns. None if the Part has failed."""
        if name in self.left_out:
            return None
        part, model = self._all[name], self.state.strategy.unwrapped.model
        self._trainings[name].step, was_training = self.state.step, model.training
        changes, fault = PartChanges(model, self.state.optimizer, sees_weights=self._sees_writes), ""
        try:
            try:
                value = getattr(part, method)(*arguments)
            finally:
                has_changed = model.training != was_training
                if has_changed:
                    model.train(was_training)
                if written := changes.written():
                    self.writes.setdefault(name, f"{written} in {method}")
                fault = changes.restore_groups()
            if has_changed and not fault:
                fault = "it left the model in a different mode; end it with training.model.train()"
            if fault:
                raise RuntimeError(fault)
            return value
        except LockstepError:  # of a collective, or another that says what to do
            raise
        except (Exception, SystemExit) as error:  # one rank that exits would leave the others waiting
            if part.required and isinstance(error, torch.OutOfMemoryError):  # less samples at once may help
                raise torch.OutOfMemoryError(f"in {method} of the Part {name}: {error}") from error
            frame = frame_of_task(error)
            line = f"{frame.filename}:{frame.lineno}"
            if fault and library_of(frame.filename) == LOCKSTEP:  # seen when the Part had returned
                line = line_of(getattr(part, method))
            what = f"the Part {name} failed in {method}: {type(error).__name__}: {error}"
            where = f"step {self.state.step}, rank {self.state.world.rank}, {line}"
            if part.required:
                remedy = "correct the Part; or, if the training can do without it, give it required = False"
                raise TrainingError(what, where=where, remedy=remedy) from error
            self.left_out.add(name)
            text = f"warning: {where}: {what}; the training continues without this Part"
            self.lines(text)
            if self.state.world.rank:  # the logs are those of rank 0
                print(text, file=sys.stderr, flush=True)
            return None

    def take_logged(self) -> dict[str, float]:
        """The numbers that Parts have logged since the last call."""
        for training in self._trainings.values():
            self._take(training)
        found, self._figures = self._figures, {}
        return found

    def _take(self, training: Training) -> None:
        if training._logged:
            found = {name: float(value) for name, value in training._logged.items()}
            training._logged.clear()
            self._figures |= found
            self.results |= found

    # ---- requests to end the training

    def wants_end(self) -> bool:
        """True if a Part asks for the end on this rank."""
        return any(training._reason is not None for training in self._trainings.values())

    def agree(self, *, now: bool) -> bool:
        """True if the training ends after this step, the same on all ranks.

        Args:
            now: whether the ranks look for requests. They then communicate.
        """
        if self.ended is None and self.by_name and now:
            named = ((name, training._reason) for name, training in self._trainings.items())
            own = next(((name, reason) for name, reason in named if reason is not None), None)
            if self.state.world.size == 1 or self.state.world.all_sum([float(own is not None)])[0]:
                of_ranks = _gathered(self.state.world, own)
                self.ended = next((found for found in of_ranks if found is not None), None)
        return self.ended is not None

    # ---- states

    def saved(self) -> dict[str, Any]:
        """The record of the Parts in a checkpoint, as JSON: equal on all ranks. Empty if there are no Parts.

        Raises:
            TrainingError: a state cannot be saved, or the ranks have different states.
        """
        if not self.by_name:
            return {}
        states: dict[str, Any] = {}
        for name in self._stateful():
            value = self._attempt(name, "state_dict")
            if name in self.left_out:
                continue
            try:
                states[name] = nested.encode(value)
            except nested.NotSavedError as error:
                if not self.by_name[name].required:
                    continue  # `_alike` reports it
                remedy = "return numbers, texts, bytes, tensors, and nested lists, tuples, sets and dicts of these"
                what = f"the state cannot be saved: {error}"
                raise TrainingError(what, where=f"{name}.state_dict", remedy=remedy) from error
        if self._stateful():  # on all ranks alike, also if a Part has failed
            states = self._alike(states)
        return {"states": states, "ended": self.ended}

    def _alike(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """The states that are the same on all ranks. A Part with `required = False` may have failed on some rank.

        Raises:
            TrainingError: a required Part has different states.
        """
        digests = {name: zlib.crc32(repr(_comparable(value)).encode()) for name, value in states.items()}
        of_ranks = _gathered(self.state.world, digests)
        for name in self._stateful():
            found = [others.get(name) for others in of_ranks]
            rank = next((rank for rank, digest in enumerate(found) if digest is None or digest != found[0]), None)
            if rank is None:
                continue
            where = f"{name}.state_dict, step {self.state.step}"
            if self.by_name[name].required:
                raise TrainingError(
                    f"rank {rank} has a different state from rank 0, whose state would be saved",
                    where=where,
                    remedy="in before_save, combine what differs by rank, with training.gather or "
                    "training.all_sum; or change the state on all ranks, and only print or write on rank 0",
                )
            if name not in self.unsaved:
                self.unsaved.add(name)
                what = (
                    "has failed, or its state cannot be saved,"
                    if found[rank] is None
                    else "has a different state from rank 0"
                )
                self.lines(f"warning: {where}: the Part {what} on rank {rank}; its state is no longer saved")
        return {name: value for name, value in states.items() if name not in self.unsaved}

    def restore(self, saved: Mapping[str, Any]) -> list[str]:
        """Give the Parts the states that a checkpoint has.

        Args:
            saved: what `saved` returned. Empty: the checkpoint is of a training without Parts.

        Returns:
            notes for the log.
        """
        states = saved.get("states", {})
        notes = []
        for name in self._stateful():
            if name in states:
                self._attempt(name, "load_state_dict", nested.decode(states[name], self.state.world.device))
            else:
                notes.append(f"note: the checkpoint has no state of the Part {name}, which starts from the beginning")
        for name in states.keys() - self.by_name.keys():
            notes.append(f"note: the checkpoint's state of {name} is left out, because there is no Part of this name")
        ended = saved.get("ended")
        if ended and ended[0] in self.by_name:
            self.ended = (ended[0], ended[1])
        return notes

    def _stateful(self) -> list[str]:
        return [name for name, part in self.by_name.items() if overrides(part, "state_dict")]


def check(parts: Sequence[Part]) -> None:
    """Check that these are Parts with different names.

    Raises:
        UsageError: they are not.
    """
    if isinstance(parts, type | Part) or not isinstance(parts, Iterable):
        kind = "one Part" if isinstance(parts, Part) else _kind(parts)
        raise UsageError(f"parts is {kind}", where="parts", remedy="give a list: parts=[...]")
    names: set[str] = set()
    for part in parts:
        if not isinstance(part, Part):
            raise UsageError(
                f"{_kind(part)} is not a Part", where="parts", remedy="give objects of subclasses of lockstep.Part"
            )
        if label(part) in names:
            what = f"two Parts have the name {label(part)!r}"
            raise UsageError(what, where="parts", remedy="give one of them another name: name = ...")
        names.add(label(part))


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _gathered(world: World, value: Any) -> list[Any]:
    """The `value` of every rank, on every rank."""
    gathered: list[Any] = world.broadcast(world.gather(value))
    return gathered


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: local(of.grad) for name, of in model.named_parameters() if of.grad is not None}


def _before_update(parts: JoinedParts | None) -> None:
    if parts is not None:
        parts.call("before_update")
        match_strides(fused_on_cpu(parts.state.optimizer))  # a Part may have replaced gradients


def _comparable(value: Any) -> Any:
    """An encoded value without the kind of device of its tensors."""
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items() if key != "on_host"}
    return [_comparable(item) for item in value] if isinstance(value, list) else value
