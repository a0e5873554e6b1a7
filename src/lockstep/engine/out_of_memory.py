"""When the memory of a device does not suffice: all ranks give up the step together, and nothing was changed."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

from lockstep.distributed import strategy
from lockstep.errors import MemoryShortage

if TYPE_CHECKING:
    from lockstep.engine.step import TrainState


class StepTooLarge(Exception):
    """The micro-batch of a step did not fit on some rank. Raised on all; weights, buffers and the step are as they were."""


class Guard:
    """Lets the ranks of a step agree on whether its micro-batches fit, before gradients travel.

    On one rank a step that does not fit is given up wherever that shows. With DDP nothing but buffers travels before the last
    backward pass of a step, so ranks agree just before it: one small all-reduce of host memory, which a GPU that is
    behind its host does not notice. In the first two steps (the second is the first with optimizer state) every rank tries
    one backward pass on its own before, since the last backward pass itself can no longer be given up by one rank. Under
    FSDP every forward pass is a collective: there, and where the last backward pass does not fit, the rank fails with
    `MemoryShortage`, and the launcher's restart goes on with smaller micro-batches.

    Args:
        enabled: whether steps are to be guarded at all.
    """

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.trials = 2
        self.open = False  # whether the other ranks still wait for this one's word

    @contextlib.contextmanager
    def step(self, state: TrainState, batch: Any) -> Generator[None, None, None]:
        """Around the forward and backward passes of a step; `batch` is its first micro-batch.

        Raises:
            StepTooLarge: on all ranks.
            MemoryShortage: on the rank whose memory did not suffice, when others cannot give up any more.
        """
        step, agree = state.step - 1, state.world.size > 1 and not strategy.is_sharded(state.forward)
        before = [buffer.clone() for buffer in state.forward.buffers()]
        self.open = agree
        try:
            if agree and self.trials:
                self.trials -= 1
                strategy.dry_run(strategy.unwrap_ddp(state.forward), batch, state.precision)
                self._agree(state, fits=True)
            self.open = (
                agree and not state.must_warm_up_buckets and state.agreed is not None
            )  # settling and agreeing are collectives
            yield
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold activations
            words = str(error).splitlines()[0]
            if state.world.size > 1 and not self.open:
                remedy = "the next start takes smaller micro-batches: give the same command again, or --max-restarts"
                raise MemoryShortage(
                    f"out of memory: {words}", where=f"step {step + 1}, rank {state.world.rank}", remedy=remedy
                ) from None
            with contextlib.suppress(StepTooLarge):
                self._agree(state, fits=False)
        except StepTooLarge:
            pass
        else:
            return
        self._restore(state, before)
        raise StepTooLarge

    def last_backward(self, state: TrainState) -> None:
        """Just before gradients travel, where it is `open`."""
        self._agree(state, fits=True)

    def _agree(self, state: TrainState, fits: bool) -> None:
        self.open = False
        if state.world.all_sum([float(not fits)])[0]:
            raise StepTooLarge

    def _restore(self, state: TrainState, buffers: list[torch.Tensor]) -> None:
        state.step -= 1
        state.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in zip(state.forward.buffers(), buffers, strict=True):
                buffer.copy_(before)
        gc.collect()
        if state.world.device.type == "cuda":
            torch.cuda.empty_cache()
        state.rewrap()  # DDP waits for a backward pass that will not come
