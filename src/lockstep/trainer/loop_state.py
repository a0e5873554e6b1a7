"""What belongs to the script of a `Loop`, and is saved with the run: its state, its schedulers and learning rates."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from typing import Any, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.core import optimizer_class
from lockstep.core.errors import UsageError
from lockstep.core.part import Part, Training


class LoopState(dict[str, Any]):
    """`Loop.state`. An object with `state_dict` and `load_state_dict` is saved by these.

    When the script assigns it again, under the same name, it gets the state that the checkpoint has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, Any] = {}
        """States of objects that the script has not assigned yet."""

    def __setitem__(self, name: str, value: Any) -> None:
        if _has_state(value) and name in self.waiting:
            value.load_state_dict(self.waiting.pop(name))
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """The value of a name, which is `default` if there is none."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *others: Any, **more: Any) -> None:
        """Add all values of other dicts."""
        for name, value in dict(*others, **more).items():
            self[name] = value

    def saved(self) -> dict[str, Any]:
        """The values, and the states of objects."""
        objects = {name: dict(value.state_dict()) for name, value in self.items() if _has_state(value)}
        return {
            "state": {name: value for name, value in self.items() if not _has_state(value)},
            "objects": self.waiting | objects,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take what `saved` returned."""
        self.clear()
        self.waiting = dict(saved["objects"])
        self.update(saved["state"])


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


@final
class LoopStatePart(Part):
    """Saves `Loop.state`, the schedulers of the optimizer and the learning rates.

    Args:
        optimizer: of the loop.
        scheduler: that the loop steps.
    """

    name = "loop"

    def __init__(self, optimizer: Optimizer, scheduler: Any) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.state = LoopState()
        self.best: dict[str, float] = {}
        """By file, the best value of `Loop.save(if_best=...)`."""
        self.schedulers: dict[str, Any] = {}
        """By the name of their class."""
        self.training: Training | None = None
        self._saved: Mapping[str, Any] | None = None

    def start(self, training: Training) -> None:
        self.training = training

    def find_schedulers(self) -> list[str]:
        """Find the schedulers that the script has made, and give new ones what the checkpoint has.

        Returns:
            the names of the new schedulers.

        Raises:
            UsageError: there are two of one class, so that a checkpoint cannot tell them apart.
        """
        found: dict[str, Any] = {}
        for one in schedulers_of(self.optimizer, self.scheduler):
            name = type(one).__name__
            if name in found:
                remedy = "join them by ChainedScheduler or SequentialLR; in a notebook, make the optimizer again, too"
                raise UsageError(f"the optimizer has two schedulers of the class {name}", where="Loop", remedy=remedy)
            found[name] = one
        new = [name for name, one in found.items() if self.schedulers.get(name) is not one]
        self.schedulers = found
        if new:
            self._restore(new)
        return new

    def check_all_found(self) -> list[str]:
        """Find schedulers that were made after the Loop. Returns a note on those that the script no longer makes."""
        self.find_schedulers()
        left = self._of_checkpoint().keys() - self.schedulers.keys()
        why = "because the script does not make this scheduler before its loop"
        return [f"note: the checkpoint's state of {name} is left out, {why}" for name in sorted(left)]

    def check_none_is_late(self) -> None:
        """After the first step.

        Raises:
            UsageError: the body of the loop has made a scheduler, which would begin again in a resumed run.
        """
        if late := self.find_schedulers():
            remedy = "make it before `for step in loop`: a resumed run then gives it the state that it had"
            raise UsageError(f"the body of the loop made a {late[0]}", where="for step in loop", remedy=remedy)

    def is_best(self, name: str, value: float) -> bool:
        """Whether a value is above those of all earlier calls for this name."""
        if not value > self.best.get(name, -math.inf):
            return False
        self.best[name] = value
        return True

    def state_dict(self) -> dict[str, Any]:
        return self.state.saved() | {
            "best": self.best,
            "schedulers": {name: one.state_dict() for name, one in self.schedulers.items()},
            "rates": [float(group["lr"]) for group in self.optimizer.param_groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state.load(state)
        self.best = dict(state["best"])
        self._saved = state

    def restore_rates(self) -> None:
        """Give the schedulers and the optimizer what the checkpoint has. A Part may not do so in an event."""
        self.find_schedulers()
        self._restore([])

    def _restore(self, new: list[str]) -> None:
        of_checkpoint = self._of_checkpoint()
        for name in new:
            if name in of_checkpoint:
                self.schedulers[name].load_state_dict(of_checkpoint[name])
        if self._saved is not None:  # a scheduler that is made sets the first rates again
            for group, rate in zip(self.optimizer.param_groups, self._saved["rates"], strict=True):
                group["lr"] = group["base_lr"] = rate

    def _of_checkpoint(self) -> Mapping[str, Any]:
        if self._saved is None:
            return {}
        found: Mapping[str, Any] = self._saved["schedulers"]
        return found


def schedulers_of(optimizer: Optimizer, given: Any = None) -> list[Any]:
    """The schedulers of an optimizer that the script has made, and which are not parts of others.

    torch does not list them: a scheduler refers to its optimizer, but not the reverse.

    Args:
        given: a scheduler that counts in any case.
    """
    ours = {id(one) for one in (optimizer, *optimizer_class.members(optimizer))}
    found = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler) and id(_optimizer(one)) in ours]
    if given is not None and all(one is not given for one in found):
        found.append(given)
    inside = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    return [one for one in found if id(one) not in inside]


def _optimizer(scheduler: Any) -> Any:
    return getattr(scheduler, "optimizer", None)


def check_scheduler(scheduler: Any, optimizer: Optimizer, every: str) -> None:
    """Check that the loop can step a scheduler.

    Raises:
        UsageError: it cannot; names the remedy.
    """
    where = "Loop(scheduler=...)"
    if every not in ("step", "epoch"):
        what = f"scheduler_every={every!r}"
        raise UsageError(what, where="Loop(...)", remedy="give 'step' (after each update) or 'epoch'")
    if isinstance(scheduler, ReduceLROnPlateau):
        remedy = "leave it out, and call scheduler.step(value) in the body of the loop: it is saved all the same"
        raise UsageError("a ReduceLROnPlateau needs a value, which the loop does not have", where=where, remedy=remedy)
    if scheduler is not None and getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UsageError("it belongs to another optimizer", where=where, remedy="make it of the optimizer of the Loop")
