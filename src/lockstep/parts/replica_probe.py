"""A comparison of the ranks every few steps: `train.probe_every`."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from lockstep.core.built_in import BuiltInPart, Inside
from lockstep.core.data.loader import MicroBatch
from lockstep.core.errors import TrainingError
from lockstep.core.parallel.strategy import Strategy
from lockstep.core.part import Training
from lockstep.parts.replicas import (
    Difference,
    RankLosses,
    differing,
    digests_of,
    losses_of_one_batch,
    other_losses,
    tensors_of_state,
)

_SHOWN = 8  # ranks in an error
_OF_BUFFERS = ("model", "buffer")  # the beginnings of names of buffers in `tensors_of_state`


class ReplicaProbe(BuiltInPart):
    """Compares the ranks every few steps and before each save, and ends the training where they differ.

    Buffers that forward passes change may differ: each rank changes its own, and all get those of rank 0 before they
    are used again. torch counts most changes. Of the others (`buffer.data`) the values tell: what has changed since the
    last comparison on several ranks is no damage of one rank.

    Args:
        every: steps between two comparisons.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def start(self, training: Training) -> None:
        assert isinstance(training, Inside)
        state = self.state = training.state
        if training.ranks == 1:
            training.tell("note: train.probe_every compares nothing on one rank")
        self._changing = _ChangingBuffers(state.strategy)
        tensors, of_buffers = tensors_of_state(state), self._buffer_names()
        self._buffers = digests_of({name: tensors[name] for name in of_buffers if name in tensors})
        self._micro_batch: MicroBatch | None = None
        self._compares_losses = True
        self._has_repeated = False
        self._compared_at = state.step

    def after_step(self, training: Training) -> None:
        """Keep a batch of the step for the next comparison, and compare the ranks, if that is due. A collective.

        Raises:
            TrainingError: on all ranks; names the rank that differs, and the first tensor.
        """
        assert isinstance(training, Inside)
        self._micro_batch = training.micro_batches[0]
        if training.ranks > 1 and training.step % self.every == 0:
            with training.window.excluded():
                self._compare(training)

    def before_save(self, training: Training) -> None:
        """Compare the ranks as `after_step` does, if that was not done for this state."""
        if training.ranks > 1 and self._compared_at != training.step:
            self._compare(training)

    def _compare(self, training: Training) -> None:
        self._compared_at = self.state.step
        self._compare_states()
        if self._micro_batch is None or not self._compares_losses:
            return
        losses = self._losses()
        found = other_losses(losses)
        if found is None and self._has_repeated:
            return
        self._has_repeated = True
        if self._losses() != losses:  # the same lists on all ranks, so all go on alike
            self._compares_losses = False
            training.tell(
                f"warning: after step {self.state.step}, the loss of one batch changes when it is computed again: the "
                "model or its kernels are not deterministic. From here on, only the states of the ranks are compared"
            )
            return
        if found is None:
            return
        head, who = found
        shown = ", ".join(f"rank {rank}: {float.fromhex(own[head]):.17g}" for rank, own in enumerate(losses[:_SHOWN]))
        raise self._error(
            f"{who} in the {head} of one batch, though their states are the same ({shown})",
            "the device or the libraries of a rank compute other numbers: compare the machines with lockstep "
            "preflight. A Task.loss that depends on the rank cannot be compared: set train.probe_every=0",
        )

    def _losses(self) -> list[RankLosses]:
        micro_batch, is_first = self._micro_batch, self.state.world.rank == 0
        assert micro_batch is not None
        losses = losses_of_one_batch(self.state, micro_batch.batch if is_first else None)
        micro_batch.let_go()
        return losses

    def _compare_states(self) -> None:
        state, world = self.state, self.state.world
        every, of_buffers, left_out = digests_of(tensors_of_state(state)), self._buffer_names(), self._changing.names()
        before, self._buffers = self._buffers, {name: every[name] for name in of_buffers if name in every}
        compared = {name: numbers for name, numbers in every.items() if name not in left_out}
        if not state.strategy.is_sharded:  # one number of each rank tells that all is well
            total = zlib.crc32(repr(sorted(compared.items())).encode())
            if len(set(world.broadcast(world.gather(total)))) == 1:
                return
        by_rank = world.gather((compared, {name for name, now in self._buffers.items() if before.get(name) != now}))
        found: list[Difference] = []
        if by_rank is not None:
            counts = Counter(name for _, names in by_rank for name in names)
            found = [one for one in differing([of_rank for of_rank, _ in by_rank]) if counts[one.name] < 2]
        found = world.broadcast(found)
        if found:
            more = f", and in {len(found) - 1} more tensors" if len(found) > 1 else ""
            raise self._error(
                f"the ranks do not hold the same state: {found[0].who} in {found[0].name}{more}",
                "look for code that changes the model or the optimizer on some ranks, and for a defective device or "
                "memory of the rank that differs",
            )

    def _buffer_names(self) -> Collection[str]:
        """The names that `tensors_of_state` may give to buffers."""
        return {
            f"{kind}.{name}" for name, _ in self.state.strategy.unwrapped.model.named_buffers() for kind in _OF_BUFFERS
        }

    def _error(self, what: str, remedy: str) -> TrainingError:
        where = f"step {self.state.step}, train.probe_every={self.every}"
        return TrainingError(f"{what}. This state is not saved", where=where, remedy=remedy)


class _ChangingBuffers:
    """Notes which buffers the forward passes of training change: torch counts the changes of each tensor.

    Kernels of normalisation layers change their buffers without a trace, so these count as changing.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.model = strategy.unwrapped.model
        self.found = {
            name
            for prefix, module in self.model.named_modules()
            if isinstance(module, _NormBase)
            for name, _ in module.named_buffers(prefix, recurse=False)
        }
        self._before: dict[str, tuple[Tensor, int]] = {}
        strategy.unwrapped.register_forward_pre_hook(self._begin)
        strategy.unwrapped.register_forward_hook(self._end)

    def names(self) -> Collection[str]:
        """The names in `tensors_of_state` of the buffers that change."""
        return {f"{kind}.{name}" for kind in _OF_BUFFERS for name in self.found}

    def _begin(self, *_: Any) -> None:
        self._before = {name: (buffer, buffer._version) for name, buffer in self.model.named_buffers()}

    def _end(self, *_: Any) -> None:
        for name, buffer in self.model.named_buffers():
            before, version = self._before.get(name, (None, 0))
            if buffer is not before or buffer._version != version:
                self.found.add(name)
        self._before = {}
