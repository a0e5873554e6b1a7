"""DDP: a full copy of the model on each rank; gradients are averaged during the backward pass."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.single import Single, constant_loss_error, unused_error
from lockstep.core.parallel.strategy import Forward, Losses, TrialPass
from lockstep.core.parallel.world import World


class DDP(Single):
    """`torch.nn.parallel.DistributedDataParallel` around the `Forward`. For the methods, see `Strategy`."""

    forward: DistributedDataParallel

    def __init__(self, world: World, options: ParallelConfig) -> None:
        super().__init__(world, options.find_unused_parameters)
        self.options = options

    def wrap(self, forward: Forward, blocks: Sequence[nn.Module] = ()) -> None:
        if hasattr(self, "forward"):
            del self.forward
            gc.collect()  # the hooks of the old wrapper go with it, and it is part of reference cycles
        self.unwrapped = forward
        self._parameters = self._parameters or dict(forward.model.named_parameters())
        self._note_trainable()
        self.forward = DistributedDataParallel(
            forward,
            bucket_cap_mb=self.options.bucket_mb,
            find_unused_parameters=self.options.find_unused_parameters,
            gradient_as_bucket_view=self.options.gradient_as_bucket_view,
            static_graph=self.options.static_graph,
        )
        # `begin_step` gives every rank the buffers of rank 0.
        self.forward.broadcast_buffers = False  # the argument of this name would also leave them out here
        # DDP rearranges its gradient buckets after the first backward pass. With three ranks and more, the order in
        # which an element is added over ranks depends on its place in the bucket. Without a warm-up, the first step
        # after a restart would differ in its last bits from the same step of a run that never stopped (seen on gloo
        # with 3 and 4 ranks). With a static graph, the first backward pass must not be one without reduction.
        rearranges = self.world.size > 2 and not self.options.find_unused_parameters
        self.must_warm_up = self.options.static_graph or rearranges

    def _warm_up(self, trial: TrialPass) -> None:
        if self.must_warm_up:
            check = self._check_all_used if self._must_check_used else None
            self.pass_of_zeros(trial.batch(), trial.precision, trial.ignored_heads, check)
            self.must_warm_up = False

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.forward.no_sync()

    def _zero_roots(self, losses: Losses, constants: Sequence[str], last: bool) -> list[nn.Parameter]:
        if self.options.static_graph:
            raise constant_loss_error(constants[0], "parallel.static_graph")
        if not self.options.find_unused_parameters:
            return super()._zero_roots(losses, constants, last)
        if last and not any(losses[head].requires_grad for head in losses):
            raise constant_loss_error(constants[0], "parallel.find_unused_parameters")
        return []

    def _check_reduced(self) -> None:
        # DDP itself raises at its next forward pass. Until then, other collectives of this rank would be paired with
        # the gradients that the other ranks wait for, which ends in an abort without a message (gloo) or in a hang.
        if self.options.find_unused_parameters:
            return
        try:
            self.forward.reducer._rebuild_buckets()  # private: DDP's next forward pass calls it, and raises from it
        except RuntimeError as error:
            self._check_kept()
            match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            names = list(self.trainable)
            unused = [names[int(number)] for number in match[1].split()] if match else ["(DDP does not say which)"]
            raise unused_error(unused, "Task.loss", " on this rank, though they did before") from error
