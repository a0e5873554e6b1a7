"""When the memory of a device does not suffice for a step: all ranks give up the step together."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Generator

import torch

from lockstep import devices
from lockstep.data.loader import MicroBatch
from lockstep.distributed.buffers import BuffersCannotBeRestored, ChangingBuffers
from lockstep.distributed.precision import Precision
from lockstep.distributed.strategy import Strategy
from lockstep.distributed.world import World
from lockstep.errors import MemoryShortage

_TRIALS = 2


class StepTooLarge(Exception):
    """The micro-batches of a step did not fit into the memory of some rank. Raised on all ranks."""


class Guard:
    """Lets the ranks of a step agree on whether its micro-batches fit, before gradients travel.

    On one rank, a step that does not fit is given up wherever that shows. With DDP, nothing travels from the copy of a
    step's first batch to its last backward pass, so the ranks agree just before that pass. This takes one small
    all-reduce of host memory, which a GPU that is behind its host does not notice. The last backward pass itself cannot
    be given up by one rank alone. So before the first two steps (the second is the first with optimizer state), every
    rank tries one backward pass alone.

    With FSDP, every forward pass is a collective. There, and where the last backward pass does not fit, the rank fails
    with `MemoryShortage`, and the restart by the launcher goes on with smaller micro-batches. The same holds where the
    update does not fit: the optimizer's state, which the first update allocates, or the averages. By then some weights
    may have changed, so this process cannot go on, and the next start goes on from the newest checkpoint.

    Args:
        enabled: whether steps are guarded at all.
    """

    def __init__(self, strategy: Strategy, precision: Precision, enabled: bool = False) -> None:
        self.strategy, self.precision, self.enabled = strategy, precision, enabled
        self.buffers = ChangingBuffers(strategy.unwrapped)
        self.is_pending = False
        """The other ranks of this step still wait for this rank to say whether its micro-batches fit."""
        self.reset()

    def reset(self) -> None:
        """Other parameters train, or micro-batches have another size: try the next steps alone again."""
        self.trials = _TRIALS

    @contextlib.contextmanager
    def step(self, first: MicroBatch, number: int, heads_are_agreed: bool) -> Generator[None, None, None]:
        """Around the forward and backward passes of a step, and the copies of its batches to the device.

        Args:
            first: the first micro-batch.
            number: of the step, counted from 1; for messages.
            heads_are_agreed: whether the ranks know each other's heads. Where they do not, the step begins with
                collectives, in which no rank may be missing.

        Raises:
            StepTooLarge: on all ranks. Buffers are as they were; gradients are not.
            MemoryShortage: on the rank whose memory did not suffice, where the others cannot give up any more; or
                where a forward pass has changed parameters.
        """
        strategy, world = self.strategy, self.strategy.world
        can_agree = world.size > 1 and not strategy.is_sharded
        can_give_up = can_agree or world.size == 1
        try:
            with self.buffers.restored_after(StepTooLarge) if can_give_up else contextlib.nullcontext():
                try:
                    if can_agree and self.trials:
                        self.trials -= 1
                        self.is_pending = True
                        strategy.try_alone(first.batch, self.precision)
                        self.agree()
                    self.is_pending = can_agree and not strategy.must_warm_up and heads_are_agreed
                    yield
                except Exception as error:
                    if not self._is_shortage(error):
                        raise
                    if world.size > 1 and not self.is_pending:
                        raise self._shortage(error, number) from None
                    traceback.clear_frames(error.__traceback__)  # they hold activations
                    self.agree(fits=False)
        except BuffersCannotBeRestored as error:
            raise self._shortage(error, number) from None

    @contextlib.contextmanager
    def update(self, number: int, when: str = "the update") -> Generator[None, None, None]:
        """Around the update of a step, and other work in which the ranks cannot agree to begin again.

        Args:
            number: of the step, counted from 1; for messages.
            when: what is done, for messages.

        Raises:
            MemoryShortage: on the rank whose memory did not suffice. Weights may be half updated.
        """
        try:
            yield
        except Exception as error:
            if not self._is_shortage(error):
                raise
            raise self._shortage(error, number, f" in {when}") from None

    def agree(self, fits: bool = True) -> None:
        """Tell the other ranks whether the micro-batches fit. Called just before gradients travel, if `is_pending`.

        Raises:
            StepTooLarge: they do not fit on some rank.
        """
        self.is_pending = False
        if self.strategy.world.all_sum([float(not fits)])[0]:
            raise StepTooLarge

    def _is_shortage(self, error: BaseException) -> bool:
        return self.enabled and devices.of(self.strategy.world.device).is_shortage(error)

    def _shortage(self, error: BaseException, number: int, when: str = "") -> MemoryShortage:
        traceback.clear_frames(error.__traceback__)  # they hold activations
        return _shortage(error, f"step {number}, rank {self.strategy.world.rank}", when)


class Attempt:
    """Work on the micro-batches of an evaluation, which all ranks begin again where some rank's memory did not suffice.

    Args:
        sharded: every forward pass is a collective.
        enabled: whether the ranks begin again. Otherwise the error itself is raised.
    """

    def __init__(self, world: World, *, sharded: bool, enabled: bool) -> None:
        self.world, self.enabled, self.alone = world, enabled, sharded and world.size > 1
        self.fits = True
        """Whether all work so far has fitted into the memory of this rank."""
        self._known: bool | None = None

    def run(self, work: Callable[[MicroBatch], None], micro_batches: Generator[MicroBatch, None, None]) -> bool:
        """Call `work` with each micro-batch. Returns whether all have fitted into the memory of all ranks.

        Raises:
            MemoryShortage: one does not fit, and the other ranks wait for this rank.
        """
        with contextlib.closing(micro_batches):
            for number, micro_batch in enumerate(micro_batches):
                if self.fits:
                    self._run(work, micro_batch)
                if number == 0 and not self._fits_everywhere():
                    break
        return self._fits_everywhere()

    def _run(self, work: Callable[[MicroBatch], None], micro_batch: MicroBatch) -> None:
        try:
            work(micro_batch)
        except Exception as error:
            if not self.enabled or not devices.of(self.world.device).is_shortage(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold activations
            if self.alone:
                raise _shortage(error, f"evaluation, rank {self.world.rank}") from None
            self.fits = False
            micro_batch.let_go()

    def _fits_everywhere(self) -> bool:
        """Whether all work so far has fitted into the memory of all ranks. A collective, until the answer is no."""
        if self.enabled and self._known is not False:
            self._known = not self.world.all_sum([float(not self.fits)])[0]
        return self._known is not False


def _shortage(error: BaseException, where: str, when: str = "") -> MemoryShortage:
    cause = (str(error) or "a pass changed a buffer or a parameter of which there is no copy").splitlines()[0]
    return MemoryShortage(
        f"out of memory{when}: {cause}",
        where=where,
        remedy="the next start takes smaller micro-batches: give the command again, or --max-restarts",
    )


def free_memory(device: torch.device) -> None:
    """Give unused memory back to the device."""
    gc.collect()
    devices.of(device).empty_cache()
