"""When the memory of a device does not suffice for a step: all ranks give up the step together."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Generator
from typing import Any

import torch

from lockstep import devices
from lockstep.distributed.buffers import restore_buffers
from lockstep.distributed.precision import Precision
from lockstep.distributed.strategy import Strategy
from lockstep.errors import MemoryShortage

_TRIALS = 2


class StepTooLarge(Exception):
    """The micro-batches of a step did not fit into the memory of some rank. Raised on all ranks."""


class Guard:
    """Lets the ranks of a step agree on whether its micro-batches fit, before gradients travel.

    On one rank, a step that does not fit is given up wherever that shows. With DDP, nothing but buffers travels before
    the last backward pass of a step, so the ranks agree just before it. This takes one small all-reduce of host memory,
    which a GPU that is behind its host does not notice. The last backward pass itself cannot be given up by one rank
    alone. So before the first two steps (the second is the first with optimizer state), every rank tries one backward
    pass alone.

    With FSDP, every forward pass is a collective. There, and where the last backward pass does not fit, the rank fails
    with `MemoryShortage`, and the restart by the launcher goes on with smaller micro-batches.

    Args:
        enabled: whether steps are guarded at all.
    """

    def __init__(self, strategy: Strategy, precision: Precision, enabled: bool = False) -> None:
        self.strategy, self.precision, self.enabled = strategy, precision, enabled
        self.is_pending = False
        """The other ranks of this step still wait for this rank to say whether its micro-batches fit."""
        self.reset()

    def reset(self) -> None:
        """Other parameters train, or micro-batches have another size: try the next steps alone again."""
        self.trials = _TRIALS

    @contextlib.contextmanager
    def step(self, batch: Any, number: int, heads_are_agreed: bool) -> Generator[None, None, None]:
        """Around the forward and backward passes of a step.

        Args:
            batch: of the first micro-batch.
            number: of the step, counted from 1; for messages.
            heads_are_agreed: whether the ranks know each other's heads. Where they do not, the step begins with
                collectives, in which no rank may be missing.

        Raises:
            StepTooLarge: on all ranks. Buffers are as they were; gradients are not.
            MemoryShortage: on the rank whose memory did not suffice, where the others cannot give up any more.
        """
        strategy, world = self.strategy, self.strategy.world
        can_agree = world.size > 1 and not strategy.is_sharded
        with restore_buffers(strategy.forward, only_after=StepTooLarge):
            try:
                if can_agree and self.trials:
                    self.trials -= 1
                    self.is_pending = True
                    strategy.try_alone(batch, self.precision)
                    self.agree()
                self.is_pending = can_agree and not strategy.must_warm_up and heads_are_agreed
                yield
            except torch.OutOfMemoryError as error:
                traceback.clear_frames(error.__traceback__)  # they hold activations
                message = str(error).splitlines()[0]
                if world.size > 1 and not self.is_pending:
                    raise MemoryShortage(
                        f"out of memory: {message}",
                        where=f"step {number}, rank {world.rank}",
                        remedy="the next start takes smaller micro-batches: give the command again, or --max-restarts",
                    ) from None
                self.agree(fits=False)

    def agree(self, fits: bool = True) -> None:
        """Tell the other ranks whether the micro-batches fit. Called just before gradients travel, if `is_pending`.

        Raises:
            StepTooLarge: they do not fit on some rank.
        """
        self.is_pending = False
        if self.strategy.world.all_sum([float(not fits)])[0]:
            raise StepTooLarge


def free_memory(device: torch.device) -> None:
    """Give unused memory back to the device."""
    gc.collect()
    devices.of(device).empty_cache()
