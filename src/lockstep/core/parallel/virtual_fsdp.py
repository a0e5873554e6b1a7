"""FSDP2 with virtual ranks: the same bits on any number of ranks, and as with a copy of the model on each rank.

The gradients of a virtual rank are complete after its last backward pass. FSDP then reduces them: here that only adds
them to a tree, as whole gradients, until the last virtual rank of this rank. Its backward pass exchanges what the tree
holds, block by block, and each rank adds up its rows. See `virtual_ranks` for the order, and for what a rank keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core import devices
from lockstep.core.errors import UsageError
from lockstep.core.parallel.buffers import ShardBuffers, restored_state
from lockstep.core.parallel.equal_bits import check_model, checked_count
from lockstep.core.parallel.fsdp import FSDP
from lockstep.core.parallel.gradient_buckets import add_up, by_owner
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.strategy import Forward, Losses, TrialPass, Waits
from lockstep.core.parallel.virtual import Node, Tree, held, nodes_of
from lockstep.core.parallel.world import World


class VirtualFSDP(FSDP):
    """`FSDP` whose gradients are added in a fixed order. For the methods, see `Strategy`.

    Every pass gathers blocks, so all ranks make equally many: a rank with fewer virtual ranks makes passes of zeros.

    Raises:
        UsageError: there are more ranks than virtual ranks.
    """

    def __init__(self, world: World, options: ParallelConfig) -> None:
        super().__init__(world, options)
        self.count = checked_count(world, options)
        self._progress = _Progress()
        self._reductions: list[_TreeReduceScatter] = []
        self._left = self._passes = 0  # backward passes of the virtual rank in progress: left, and in all
        self._of_shards: ShardBuffers | None = None  # None: this rank has one virtual rank
        self._trial: TrialPass | None = None

    @property
    def divisor(self) -> int:
        return 1

    def wrap(self, forward: Forward, blocks: Sequence[nn.Module] = ()) -> None:
        check_model(forward.model, self.options)
        if self.count % self.world.size and forward.is_bypassed:
            raise UsageError(
                f"{self.world.size} ranks do not divide {self.count} virtual ranks, which fsdp requires in a loop",
                where=f"parallel.virtual_ranks={self.count}",
                remedy="start a number of ranks that divides it, or use parallel.strategy=ddp",
            )
        super().wrap(forward, blocks)
        if not self._reductions:
            for module in self._modules:
                self._reductions.append(_TreeReduceScatter(self.world, self.count, self._progress))
                module.set_custom_reduce_scatter(self._reductions[-1])
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # else the factor would be a multiplication of NCCL

    def begin_step(self, trial: TrialPass | None = None) -> Any:
        self._trial = trial
        for reduction in self._reductions:
            reduction.tree.nodes.clear()
        return super().begin_step(trial)

    def _sync_buffers(self) -> None:
        super()._sync_buffers()
        if len(self.world.data_ranks) > 1:
            self._of_shards = self._of_shards or ShardBuffers(self.unwrapped)
            self._of_shards.begin()

    @property
    def _lacks_one(self) -> bool:
        """True if other ranks have one virtual rank more."""
        return self.count > len(self.world.data_ranks) * self.world.size

    def begin_shard(self, place: int, micro_batches: int) -> None:
        self._left, self._passes = micro_batches, micro_batches
        is_last = place == len(self.world.data_ranks) - 1
        self._progress.number, self._progress.ends = self.world.data_ranks[place], is_last and not self._lacks_one
        if self._of_shards is not None:
            self._of_shards.begin_shard(place)

    def end_shards(self) -> None:
        self._trial, self._progress.number, self._progress.ends = None, None, False
        if self._of_shards is not None:
            self._of_shards.end()

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return super().gradient_sync(self._left == 1)

    def backward(self, losses: Losses, factors: Losses, last: bool) -> Waits | None:
        waits = super().backward(losses, factors, last and not self._lacks_one)
        self._left -= 1
        if self._left:
            return waits
        if not last or self._lacks_one:
            self._check_used("on a virtual rank")
        if not self._progress.ends:  # FSDP has put zeros there
            for parameter in self.trainable.values():
                parameter.grad = None
        return self._pass_for_others() if last and self._lacks_one else waits

    def _pass_for_others(self) -> Waits | None:
        """Gather blocks with the ranks that have one virtual rank more. The last pass exchanges."""
        waits, self._left, self._progress.number = None, self._passes, None
        assert self._trial is not None
        with restored_state(self.unwrapped, "zeros"):
            while self._left:
                self._progress.ends = self._left == 1
                with self.gradient_sync(self._progress.ends):
                    with self._trial.precision.autocast():
                        losses: Losses = self.forward(self._trial.batch())
                    zeros = {head: torch.zeros_like(loss) for head, loss in losses.items() if loss.requires_grad}
                    waits = super().backward(losses, zeros, last=self._progress.ends)
                self._left -= 1
        return waits


@dataclass
class _Progress:
    """What the next reduction of gradients is for."""

    number: int | None = None
    """The virtual rank that they belong to. None: to none, as in a pass outside of steps."""
    ends: bool = False
    """The sums of this rank are complete, and are exchanged."""


class _TreeReduceScatter:
    """For `set_custom_reduce_scatter`: the reduction of the gradients of a module to which `fully_shard` was applied.

    Args:
        count: number of virtual ranks.
        progress: changes from one virtual rank to the next.
    """

    def __init__(self, world: World, count: int, progress: _Progress) -> None:
        self.device, self.count, self.progress = devices.of(world.device), count, progress
        self.nodes = [nodes_of(held(rank, world.size, count), count) for rank in range(world.size)]  # of each rank
        self.tree: Tree[Tensor] = Tree(count, lambda left, right: left.add_(right))

    def allocate(self, size: Sequence[Any], *, dtype: Any, device: Any) -> Tensor:
        """Memory for the gradients that are reduced, or for the sum."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add whole gradients to the tree. At the last virtual rank, put the sums of this rank's rows into `output`."""
        if self.device.has_own_memory:  # it stays in use after FSDP has let go of it
            input_tensor.record_stream(self.device.current_stream())
        if self.progress.number is not None:
            self.tree.push(Node(self.progress.number, 1, input_tensor))
        if not self.progress.ends:
            output_tensor.zero_()
            return
        wholes, ranks = [node.value for node in self.tree.nodes], len(self.nodes)
        self.tree.nodes.clear()
        sent = by_owner(wholes, ranks)
        received = sent.new_empty(sum(map(len, self.nodes)) * output_tensor.numel())
        size = output_tensor.numel() * output_tensor.element_size()
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [len(of_rank) * size for of_rank in self.nodes],
            [len(wholes) * size] * ranks,
            group=group,
        )
        output_tensor.copy_(add_up(received, self.nodes, self.count))
