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

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.core.errors import TrainingError
from lockstep.core.parallel.buffers import ShardBuffers
from lockstep.core.parallel.equal_bits import check_model, checked_count
from lockstep.core.parallel.gradient_buckets import Bucket, Gradients, buckets
from lockstep.core.parallel.options import ParallelConfig
from lockstep.core.parallel.single import Single, check_dense, unused_error
from lockstep.core.parallel.strategy import Forward, Losses, Waits
from lockstep.core.parallel.virtual import Node, Tree
from lockstep.core.parallel.world import World


class VirtualRanks(Single):
    """A full copy of the model on each rank, and a sum of gradients in a fixed order. For the methods, see `Strategy`.

    Buffers, such as the statistics of BatchNorm, are those of virtual rank 0 after each step. DDP with a rank for each
    virtual rank has the same: its rank 0 gives its buffers to the others.

    Raises:
        UsageError: there are more ranks than virtual ranks.
    """

    def __init__(self, world: World, options: ParallelConfig) -> None:
        super().__init__(world, options.find_unused_parameters)
        self._options, self.count = options, checked_count(world, options)
        self.bucket_bytes = int(options.bucket_mb * 2**20) if options.bucket_mb else None
        self._numbers = world.data_ranks
        self._nodes: list[Node[Gradients]] = []  # the sums of the virtual ranks that have ended in this step
        self._of_shards: ShardBuffers | None = None  # None: this rank has one virtual rank
        self._places: dict[int, int] = {}  # of each parameter among all that train, by its `id`
        self._hooks: list[Any] = []
        self._groups_inputs = False
        self._shard: _Shard | None = None  # the virtual rank in progress
        self._uses: list[float] = []  # of each parameter: the number of virtual ranks so far that use it
        self._left = 0  # backward passes that it still makes
        self._buckets: list[Bucket] = []
        self._bucket_of: list[int] = []  # for each parameter
        self._launched = self._gathered = 0  # the numbers of buckets that were sent, and that were added up

    @property
    def divisor(self) -> int:
        return 1

    def wrap(self, forward: Forward, blocks: Sequence[nn.Module] = ()) -> None:
        check_model(forward.model, self._options)
        super().wrap(forward, blocks)
        for hook in self._hooks:
            hook.remove()
        if self._options.strategy == "fsdp" and not self._groups_inputs:  # this rank is the only one
            self._groups_inputs = True
            for block in blocks:
                block.register_forward_pre_hook(_group_inputs, prepend=True, with_kwargs=True)
        parameters = list(self.trainable.values())
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]
        self._buckets, self._bucket_of = [], [0] * len(parameters)
        if self.world.size > 1:
            self._buckets = buckets(parameters, self.world, self.count, self.bucket_bytes)
            for number, bucket in enumerate(self._buckets):
                for place in bucket.places:
                    self._bucket_of[place] = number

    # ---- buffers

    def _sync_buffers(self) -> None:
        super()._sync_buffers()
        self._nodes, self._shard = [], None
        if len(self._numbers) > 1:
            self._of_shards = self._of_shards or ShardBuffers(self.unwrapped)
            self._of_shards.begin()

    def begin_shard(self, place: int, micro_batches: int) -> None:
        self._shard = _Shard(self._numbers[place], self.count, self._nodes, len(self._places))
        self._left = micro_batches
        if not place:
            self._uses = [0.0] * len(self._places)
        if self._of_shards is not None:
            self._of_shards.begin_shard(place)

    def end_shards(self) -> None:
        if self._of_shards is not None:
            self._of_shards.end()

    # ---- gradients

    def backward(self, losses: Losses, factors: Losses, last: bool) -> Waits | None:
        self._left -= 1
        self._launched = self._gathered = 0
        waits = super().backward(losses, factors, last)
        if not self._left:
            self._end_shard()
        if last:
            self._end_gradients()
        return waits

    def _note(self, parameter: Tensor) -> None:
        """After a backward pass has added to a gradient. In the last pass of a virtual rank, the gradient is complete.

        It goes into the tree at once, so that its memory is free again. The buckets that are complete are exchanged, on
        all ranks in the same order.
        """
        shard, place = self._shard, self._places[id(parameter)]
        if self._left or shard is None:
            return
        if shard.has[place]:
            raise TrainingError(
                "a backward pass adds to the gradient of a parameter again, after it was complete",
                where="parallel.virtual_ranks",
                remedy="call torch.utils.checkpoint.checkpoint with use_reentrant=False",
            )
        shard.take(place, parameter)
        if self._buckets and shard.number == self._numbers[-1]:
            self._buckets[self._bucket_of[place]].missing -= 1
            while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
                self._launch(shard)

    def _launch(self, shard: _Shard) -> None:
        """Begin to exchange the next bucket, and add up the one before it."""
        self._buckets[self._launched].begin([*shard.before, shard.node])
        self._launched += 1
        if self._gathered < self._launched - 1 and not self.device.has_own_memory:  # a GPU would wait, not the host
            self._buckets[self._gathered].gather()
            self._gathered += 1

    def _end_shard(self) -> None:
        """Take the gradients that the last pass of a virtual rank did not reach."""
        shard = self._shard
        assert shard is not None
        for place, parameter in enumerate(self.trainable.values()):
            self._uses[place] += shard.has[place] or shard.has_constants or parameter.grad is not None
            if not shard.has[place]:
                shard.take(place, parameter)
        if self._buckets and shard.number == self._numbers[-1]:
            while self._launched < len(self._buckets):
                self._launch(shard)
        self._nodes, self._shard = [*shard.before, shard.node], None

    def _end_gradients(self) -> None:
        """Give the parameters the sums over all virtual ranks."""
        parameters, nodes = list(self.trainable.values()), self._nodes
        self._nodes = []
        if self._buckets:
            for bucket in self._buckets[self._gathered :]:
                bucket.gather()
            for bucket in self._buckets:
                bucket.end()
        else:
            for parameter, gradient in zip(parameters, nodes[0].value, strict=True):
                parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        self._check_used()

    def _zero_roots(self, losses: Losses, constants: Sequence[str], last: bool) -> list[nn.Parameter]:
        """None: a gradient that is missing counts as zeros."""
        if self._shard is not None:
            self._shard.has_constants = True
        return []

    def _check_all_used(self, losses: Losses) -> None:
        """As that of all strategies, but `_check_used` looks at the gradients of whole virtual ranks."""
        self._check_kept()
        check_dense(losses, {id(parameter): name for name, parameter in self.unwrapped.model.named_parameters()})

    def _check_used(self) -> None:
        """Leave parameters without a gradient that no virtual rank uses.

        Raises:
            TrainingError: a virtual rank does not use some parameters, and `find_unused_parameters` does not allow it.
                In the first step on every rank.
        """
        if self.find_unused_parameters:
            used_by = self.world.all_sum(self._uses)
            for parameter, uses in zip(self.trainable.values(), used_by, strict=True):
                if not uses:
                    parameter.grad = None
            return
        is_first, self._must_check_used = self._must_check_used, False
        count = self.count if is_first else len(self._numbers)
        used_by = self.world.all_sum(self._uses) if is_first else self._uses
        missing = {name: int(count - uses) for name, uses in zip(self.trainable, used_by, strict=True) if uses < count}
        if missing and is_first:
            most = max(missing.values())
            when = "" if most == count else f" on {most} of {count} virtual ranks"
            raise unused_error(list(missing), "first step", when)
        if missing:
            raise unused_error(list(missing), "Task.loss", " on a virtual rank, though they did before")


class _Same(torch.autograd.Function):
    """Returns its inputs. The gradients of all uses of an output are added up before they go back."""

    @staticmethod
    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _group_inputs(block: nn.Module, args: Any, options: Any) -> tuple[Any, Any] | None:
    """Let a block on one rank treat its inputs as FSDP does on several.

    A block may use an input several times, as a residual block does, and others may use it, too, as the decoder of a
    U-Net does. FSDP adds up the gradients of the uses inside of the block first.
    """
    leaves, form = pytree.tree_flatten((args, options))
    places = [place for place, one in enumerate(leaves) if isinstance(one, Tensor) and one.requires_grad]
    if not places or not torch.is_grad_enabled():
        return None
    apply: Any = _Same.apply
    for place, same in zip(places, apply(*(leaves[place] for place in places)), strict=True):
        leaves[place] = same
    grouped: tuple[Any, Any] = pytree.tree_unflatten(leaves, form)
    return grouped


class _Shard:
    """The gradients of a virtual rank, which are added to the tree one by one.

    Args:
        number: of the virtual rank.
        count: number of virtual ranks.
        nodes: the sums of those of this rank before it.
        parameters: their number.
    """

    def __init__(self, number: int, count: int, nodes: Sequence[Node[Gradients]], parameters: int) -> None:
        tree: Tree[Sequence[int]] = Tree(count, lambda left, right: [*left, *right])
        tree.nodes = [Node(node.first, node.size, [place]) for place, node in enumerate(nodes)]
        tree.push(Node(number, 1, []))
        new = tree.nodes[-1]
        self.number, self.has = number, [False] * parameters
        self.has_constants = False
        """True if a loss depends on no parameter. All parameters then count as used."""
        self.before = [nodes[place] for node in tree.nodes[:-1] for place in node.value]
        """The nodes that stay."""
        self.merged = [nodes[place] for place in reversed(new.value)]
        """Those that the gradients are added to, the last first."""
        self.node: Node[Gradients] = Node(new.first, new.size, [None] * parameters)
        """The node of the virtual rank and of `merged`."""

    def take(self, place: int, parameter: Tensor) -> None:
        """Take the gradient of a parameter."""
        total, parameter.grad = parameter.grad, None
        total = None if total is None else total.resolve_conj()
        for node in self.merged:
            left, node.value[place] = node.value[place], None
            if left is not None:
                total = left.add_(0.0 if total is None else total)
            elif total is not None:
                total.add_(0.0)  # as if the other was zero: -0.0 becomes 0.0
        self.node.value[place], self.has[place] = total, True
