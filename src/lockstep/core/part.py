"""`Part`: what a user adds to a training, such as a message, a logged figure, or a rule to stop.

A Part is called at events between the steps, and once within a step, when the gradients are complete. None runs between
micro-batches. This module imports no torch, and depends neither on the loop nor on files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

EVENTS = ("start", "before_step", "before_update", "after_step", "log_entry", "after_evaluation", "before_save", "end")
"""The events of a `Part`, each with the method of its name. The ninth is its state."""
OWN_NAMES = ("train", "eval", "time", "memory", "data")
"""First parts of the names that Lockstep logs itself."""


@dataclass
class Training:
    """The view that a Part has of a training, and its requests to it. Each Part has its own, for all events.

    Figures of the training are the same on all ranks. Read them; only `before_update` may change gradients.
    """

    _reserved: ClassVar[tuple[str, ...]] = OWN_NAMES
    """First parts of names that `log` refuses."""
    model: nn.Module
    """The task's model, as `Task.model` made it. With FSDP, its parameters are parts of the whole."""
    optimizer: Optimizer
    rank: int
    """This process: 0 to `ranks` - 1."""
    ranks: int
    """Number of processes."""
    is_sharded: bool
    """True if each rank has its own shard of parameters and gradients, as with FSDP. Otherwise all have the same."""
    last_step: int
    """The step at which the training ends, unless something ends it earlier."""
    steps_per_epoch: int
    folder: Path
    """The run directory. A Part may write its own files there, on rank 0."""
    results: Mapping[str, float]
    """The last value of everything logged, such as `train/loss` and `eval/accuracy`."""
    step: int = 0
    """Steps that are done. In `before_update` the step of this update counts, and in `before_step` it does not."""
    _tell: Callable[[str], None] = field(repr=False, default=lambda text: None)
    _gather: Callable[[Any], list[Any]] | None = field(repr=False, default=None)
    _gradients: Callable[[], dict[str, Tensor]] = field(repr=False, default=dict)
    _logged: dict[str, Any] = field(repr=False, default_factory=dict)
    _reason: str | None = field(repr=False, default=None)

    @property
    def epoch(self) -> float:
        """Epochs that are done, such as 1.5."""
        return self.step / self.steps_per_epoch

    def tell(self, text: str) -> None:
        """Write a line for people into all logs. Those of rank 0 are written."""
        self._tell(text)

    def log(self, name: str, value: float | Tensor) -> None:
        """Add a number to the next entry of the log. The value of rank 0 counts; of several values the last.

        In `log_entry` and `after_evaluation`, the next entry is the entry of this event. What is logged after the last
        entry of the training gets its own entry. A tensor on a GPU is read when the entry is written.

        Args:
            name: such as `gradients/zero`. `train`, `eval`, `time`, `memory` and `data` are Lockstep's own first parts.

        Raises:
            ValueError: the name is one of Lockstep's own.
        """
        if "/" not in name or name.split("/")[0] in self._reserved:
            raise ValueError(f"the name {name!r} may be Lockstep's own: log(name) takes a name such as own/{name}")
        if isinstance(value, int | float):
            self._logged[name] = float(value)
        elif value.numel() == 1:
            self._logged[name] = value.detach()
        else:
            raise ValueError(f"log({name!r}) takes a number, and got a tensor of shape {tuple(value.shape)}")

    def request_stop(self, reason: str) -> None:
        """End the training early, on all ranks after the same step. One rank that asks is enough.

        What happens after a last step then happens: the state is saved, and evaluated if the training has
        evaluations. The same command does not train on, unless the Part is left out.

        In `log_entry` and `after_evaluation` the step of the event is the last: a decision there is the same however
        many ranks train, and after a kill. In other events one rank ends at this step, too; several ranks agree about
        once a second, and at each log entry and evaluation.

        Args:
            reason: why, for the log.
        """
        if self._reason is None:
            self._reason = reason

    def gradients(self) -> dict[str, Tensor]:
        """In `before_update`: the gradients by name of the parameter. With FSDP, those of this rank's part.

        They are those of the global batch: the mean over its units, unscaled, and clipped.
        """
        return self._gradients()

    def gather(self, value: Any) -> list[Any]:
        """The `value` of every rank, in rank order, on every rank. All ranks must call it in the same event.

        Args:
            value: anything that pickle takes.

        Raises:
            RuntimeError: the Part has `required = False`. It is left out on a rank on which it failed, and the other
                ranks would wait for this rank forever.
        """
        if self._gather is None:
            raise RuntimeError("a Part with required=False may not communicate: give it required=True")
        return self._gather(value)

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each of `values` over all ranks, on every rank. As `gather`."""
        return [sum(of_ranks) for of_ranks in zip(*self.gather([float(value) for value in values]), strict=True)]


class Part:
    """Something that joins a training. Override the methods that you need: those of this class do nothing.

    All ranks make the Part and call its methods after the same steps, in the order in which the Parts are listed. A
    Part does not know the other Parts. It does not change the weights, the model's structure or the optimizer.
    What only people see, such as a message, is done on rank 0: `if training.rank == 0`.

    After a crash a training resumes from its last checkpoint, and repeats the steps after it, with their events. So
    an event may come a second time; the state is that of the checkpoint.
    """

    name: str = ""
    """The name of the Part in messages and checkpoints. Empty: the name of the class. No two Parts have the same."""
    required: bool = True
    """True if a failure of the Part ends the training. Otherwise a failure is a warning, and the Part is not called any
    more on the rank where it failed. Such a Part cannot communicate (`gather`, `all_sum`)."""

    def start(self, training: Training) -> None:
        """Before the first step of this start, after the state was loaded. Not if the run is complete already."""

    def before_step(self, training: Training) -> None:
        """A step is about to begin: its samples are there. All that follows the step before is done, such as a save."""

    def before_update(self, training: Training) -> None:
        """The gradients of a step are complete, and the optimizer has not used them; see `Training.gradients`.

        They may be changed in place, on all ranks alike. The event is left out if an update is: if fp16
        overflowed, or the global batch has no unit. It must not communicate on a part of the ranks.
        """

    def after_step(self, training: Training) -> None:
        """A step is done. Reading a loss or a weight from a GPU here makes the host wait at each step."""

    def log_entry(self, training: Training) -> None:
        """An entry of the log is about to be written, every `log.every_steps` steps. `results` has its figures."""

    def after_evaluation(self, training: Training) -> None:
        """An evaluation has ended, and its entry is about to be written. `results` has its figures, as `eval/loss`."""

    def before_save(self, training: Training) -> None:
        """The state is about to be saved. Here ranks bring together what `state_dict` must have alike."""

    def end(self, training: Training) -> None:
        """The training has reached its end, and all is saved. Not after a signal, and not after a failure."""

    def state_dict(self) -> Any:
        """The state that a resumed training needs: numbers, texts, tensors, and nested lists and dicts of these.

        It is called when the state is saved, and after an evaluation. All ranks must return the same, because the state
        of rank 0 is kept. It is kept in manifest.json, and should be small: at most some thousands of numbers.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take what `state_dict` returned, on every rank, also of a training on a different number of ranks."""


def label(part: Part) -> str:
    """The name of a Part in messages and checkpoints."""
    return part.name or type(part).__name__


def overrides(part: Part, method: str) -> bool:
    """True if a Part overrides a method, and so needs this event."""
    return getattr(type(part), method) is not getattr(Part, method)
