"""Virtual ranks: the same bits on any number of ranks.

A global batch is split over `parallel.virtual_ranks` virtual ranks, whatever the number of ranks. A rank computes its
virtual ranks one after the other. Each of them begins the step with the same buffers, and its gradients are added in
the order of one tree; see `virtual`. A rank adds up the whole subtrees that it has. The rest is exchanged by bucket,
while the last backward pass computes the gradients of the other buckets:

    all_to_all    each rank gets, for its shard of the bucket, the subtrees of all ranks, and adds them up in the tree
    all_gather    each rank gets the sums of all shards

With one subtree on each rank, that is the traffic of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lockstep.core.errors import TrainingError, UsageError
from lockstep.core.parallel.buffers import ModuleBuffers
from lockstep.core.parallel.equal_bits import check_model
from lockstep.core.parallel.gradient_buckets import Bucket, Gradients, added, buckets
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.single import Single, unused_error
from lockstep.core.parallel.strategy import Forward, Losses, Waits
from lockstep.core.parallel.virtual import Node, Tree
from lockstep.core.parallel.world import World


class VirtualRanks(Single):
    """A full copy of the model on each rank, and a sum of gradients in a fixed order. For the methods, see `Strategy`.

    Raises:
        UsageError: there are more ranks than virtual ranks.

    Buffers, such as the statistics of BatchNorm, are those of virtual rank 0 after each step. DDP with a rank for each
    virtual rank has the same: its rank 0 gives its buffers to the others.
    """

    def __init__(self, world: World, options: ParallelConfig) -> None:
        super().__init__(world, options.find_unused_parameters)
        self.count = options.virtual_ranks or 1
        if world.size > self.count:
            raise UsageError(
                f"{world.size} ranks cannot share {self.count} virtual ranks",
                where=f"parallel.virtual_ranks={self.count}",
                remedy=f"start at most {self.count} ranks: --nproc {self.count}. More virtual ranks are a new training",
            )
        self.bucket_bytes = int(options.bucket_mb * 2**20) if options.bucket_mb else None
        self._numbers = world.data_ranks
        self._ended = 0  # this many of the virtual ranks of this rank are in the tree
        self._tree: Tree[Gradients] = Tree(self.count, added)
        self._at_begin: list[Tensor] = []  # the buffers with which each virtual rank begins
        self._of_first: list[Tensor] = []  # those with which virtual rank 0 has ended
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, int] = {}  # by `id` of a parameter
        self._hooks: list[Any] = []
        self._missing: list[set[int]] = []  # by bucket: `id` of the parameters without a gradient in this pass
        self._launched = 0  # this many buckets are being exchanged
        self._is_last = False  # in the last backward pass of a step

    @property
    def averages(self) -> int:
        return 1

    def wrap(self, forward: Forward, blocks: Sequence[nn.Module] = ()) -> None:
        check_model(forward.model, f"parallel.virtual_ranks={self.count}")
        super().wrap(forward, blocks)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buckets, self._bucket_of = [], [], {}
        if self.world.size > 1:
            self._buckets = buckets(list(self.trainable.values()), self.world, self.count, self.bucket_bytes)
            for number, bucket in enumerate(self._buckets):
                self._bucket_of |= dict.fromkeys(map(id, bucket.parameters), number)
                self._hooks += [one.register_post_accumulate_grad_hook(self._note) for one in bucket.parameters]

    # ---- buffers

    def _sync_buffers(self) -> None:
        super()._sync_buffers()
        self._ended, self._at_begin, self._of_first = 0, [], []
        self._tree.nodes.clear()
        if len(self._numbers) > 1:
            if self._buffers is None:
                self._buffers = ModuleBuffers(self.unwrapped)
            self._at_begin = [buffer.clone() for buffer in self._buffers]

    def begin_shard(self, place: int) -> None:
        if place:
            self._stash()
            assert self._buffers is not None
            if place == 1:
                self._of_first = [buffer.clone() for buffer in self._buffers]
            _set(self._buffers, self._at_begin)

    def _end_buffers(self) -> None:
        if self._of_first:
            assert self._buffers is not None
            _set(self._buffers, self._of_first)

    # ---- gradients

    def _stash(self) -> None:
        """Add the gradients of the virtual rank that has ended to the tree."""
        parameters = list(self.trainable.values())
        gradients = [parameter.grad for parameter in parameters]
        if all(gradient is None for gradient in gradients):  # a pass without gradients
            return
        self._tree.push(Node(self._numbers[self._ended], 1, gradients))
        self._ended += 1
        for parameter in parameters:
            parameter.grad = None

    def backward(self, losses: Losses, factors: Losses, last: bool) -> Waits | None:
        self._is_last, self._launched = last and bool(self._buckets), 0
        self._missing = [set(map(id, bucket.parameters)) for bucket in self._buckets if last]
        try:
            waits = super().backward(losses, factors, last)
        finally:
            self._is_last = False
        if last:
            self._end_gradients()
            self._end_buffers()
        return waits

    def _note(self, parameter: Tensor) -> None:
        """After a backward pass has added to the gradient of a parameter: exchange the buckets that are complete.

        All ranks exchange the buckets in the same order.
        """
        if not self._is_last:
            return
        if self._bucket_of[id(parameter)] < self._launched:
            raise TrainingError(
                "a backward pass adds to the gradient of a parameter again, after it was exchanged",
                where="parallel.virtual_ranks",
                remedy="call torch.utils.checkpoint.checkpoint with use_reentrant=False",
            )
        self._missing[self._bucket_of[id(parameter)]].discard(id(parameter))
        while self._launched < len(self._buckets) and not self._missing[self._launched]:
            self._launch()

    def _launch(self) -> None:
        self._buckets[self._launched].begin(self._tree.nodes, self._numbers[-1])
        self._launched += 1

    def _end_gradients(self) -> None:
        """Bring the gradients of all virtual ranks together."""
        if self._buckets:
            while self._launched < len(self._buckets):
                self._launch()
            for bucket in self._buckets:
                bucket.gather()
            for bucket in self._buckets:
                bucket.end()
            used = [is_used for bucket in self._buckets for is_used in bucket.used]
            parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        else:
            parameters = list(self.trainable.values())
            self._tree.push(Node(self._numbers[-1], 1, [parameter.grad for parameter in parameters]))
            for parameter, gradient in zip(parameters, self._tree.total(), strict=True):
                parameter.grad = gradient
            used = [parameter.grad is not None for parameter in parameters]
        self._tree.nodes.clear()
        self._check_used(parameters, used)

    def _check_used(self, parameters: Sequence[nn.Parameter], used: Sequence[bool]) -> None:
        """Leave parameters without a gradient that no virtual rank has used.

        Raises:
            TrainingError: there are such parameters on this rank, and `find_unused_parameters` does not allow them.
        """
        if not self.find_unused_parameters:
            unused = {id(one) for one, is_used in zip(parameters, used, strict=True) if not is_used}
            if names := [name for name, one in self.trainable.items() if id(one) in unused]:
                raise unused_error(names, "Task.loss", " on this rank, though they did before")
            return
        used_on = self.world.all_sum([float(is_used) for is_used in used])
        for parameter, ranks in zip(parameters, used_on, strict=True):
            if not ranks:
                parameter.grad = None


def _set(buffers: ModuleBuffers, values: Sequence[Tensor]) -> None:
    """Give buffers their earlier values, and shapes."""
    for buffer, value in zip(buffers, values, strict=True):
        if buffer.shape == value.shape:
            buffer.data.copy_(value)
        else:
            buffer.data = value.clone()
