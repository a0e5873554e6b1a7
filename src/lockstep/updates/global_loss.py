"""A loss over all samples of the global batch, such as that of CLIP: the same on any ranks and micro-batches.

    E = the embeddings of all samples        first pass, without gradient: each rank embeds its micro-batches, and all
                                             ranks gather them
    L = Task.loss(model, E), G = dL/dE       on every rank alike
    sum(embeddings of a micro-batch * G)     second pass, with gradient: its gradient is that of L through these samples

So no rank holds the activations of more than one micro-batch. The second pass draws the same random numbers as the
first. Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"
(arXiv:2101.06983), section 3.2.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lockstep.core.data.loader import MicroBatch, one_ahead
from lockstep.core.data.order import derive_seed
from lockstep.core.data.randomness import SeededGenerator, seed_forward
from lockstep.core.errors import TrainingError, number_of
from lockstep.core.parallel.buffers import restored_state
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.single import leaves
from lockstep.core.parallel.strategy import Losses, Strategy, by_head
from lockstep.core.parallel.world import World
from lockstep.core.step import Call, StepResult, TrainState, driven, exact_step, seed_of
from lockstep.core.task import Task
from lockstep.updates.rows import gather_rows

_NEAR = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}
"""How far embeddings of the second pass may be from those of the first, relative to the largest, by precision."""


class _Gathered(NamedTuple):
    """The embeddings of a global batch, and the gradient of the loss with respect to them."""

    values: list[Tensor]
    """Tensors of shape (samples of the global batch, ...), detached. Samples are in the order of their indices, or of
    their positions in the epoch if an order draws them."""
    form: TreeSpec
    """How `Task.embed` nests the tensors."""
    gradients: dict[str, list[Tensor | None]]
    """By head, for each tensor. None: the loss does not depend on it."""
    losses: Losses
    """By head: of the whole batch, the same on every rank."""
    uses_parameters: bool
    """True if the loss itself uses parameters of the model, such as a temperature."""


class GlobalLoss:
    """The update of a task that has `Task.embed`."""

    def __init__(self, task: Task, world: World, precision: Precision) -> None:
        self.task, self.world, self.precision = task, world, precision
        self._gathered: _Gathered | None = None
        self._places: list[Tensor] = []  # of each micro-batch: the places of its samples in the gathered embeddings
        self._carrier: int | None = None  # the micro-batch whose loss is that of the global batch
        self._must_compare = True  # whether both passes of the first step give the same embeddings
        self._seed = 0
        self._private: list[SeededGenerator] = []

    def step(
        self, state: TrainState, micro_batches: Sequence[MicroBatch], samples: int, *, want_norm: bool = False
    ) -> StepResult:
        """Consume one global batch. For the arguments, see `exact_step`."""
        update = exact_step(state, micro_batches, samples, want_norm=want_norm, fillers_count=True)
        calls = self._calls(state, micro_batches)
        return driven(update, lambda asked: next(calls))

    def _calls(self, state: TrainState, micro_batches: Sequence[MicroBatch]) -> Generator[Call | None, None, None]:
        """The answers to what `exact_step` yields: the first pass is made when it begins."""
        self._embed(state, micro_batches, state.step - 1)
        yield None
        per_shard = len(micro_batches) // len(self.world.data_ranks)
        for number in range(len(micro_batches)):
            yield self._call(number, last=number % per_shard == per_shard - 1)
            yield None

    def _embed(self, state: TrainState, micro_batches: Sequence[MicroBatch], step: int) -> None:
        """The first pass of a step: embed, gather, and compute the gradient with respect to the embeddings.

        Raises:
            TrainingError: `Task.embed` returns something else than tensors with a row for each sample.
        """
        rows: list[list[Tensor]] = []
        self._private = state.strategy.unwrapped.private
        strategy, per_shard = state.strategy, len(micro_batches) // len(self.world.data_ranks)
        shard_of = [number // per_shard for number in range(len(micro_batches))]
        with restored_state(strategy.unwrapped, "embed"), torch.no_grad():
            for number, micro_batch in enumerate(one_ahead(micro_batches)):
                if number % per_shard == 0:
                    strategy.begin_shard(shard_of[number], per_shard)
                seed_forward(seed_of(state, step, number, shard_of), self.world.device, self._private)
                with self.precision.autocast():
                    embedded = strategy.forward(micro_batch.batch, self.task.embed)
                leaves_of, form = _rows(embedded, len(micro_batch.indices))
                rows.append([leaf[: micro_batch.samples] for leaf in leaves_of])
            for _ in range(self._missing_passes(strategy, per_shard)):
                with self.precision.autocast():
                    strategy.forward(micro_batches[0].batch, self.task.embed)
        device = rows[0][0].device
        words = [word for one in micro_batches if not one.filler for word in one.words]
        own = [torch.tensor(words, dtype=torch.int64, device=device), *map(torch.cat, zip(*rows, strict=True))]
        (order, *values), first = gather_rows(own, self.world)
        order = order.argsort(stable=True)
        places = order.argsort()[first : first + len(words)]
        self._places = list(torch.split(places, [one.samples for one in micro_batches]))
        self._seed = derive_seed(state.seed, step)  # of the loss: the same on all ranks
        values = [value[order] for value in values]
        self._carrier = None
        if first == 0 and words:
            self._carrier = next(number for number, one in enumerate(micro_batches) if one.samples)
        self._gathered = self._differentiated(strategy, values, form)

    def _missing_passes(self, strategy: Strategy, per_shard: int) -> int:
        """The passes that other ranks make for one shard more than this rank has, if each pass is a collective."""
        most = -(-self.world.data_size // self.world.size)
        return per_shard * max(0, most - len(self.world.data_ranks)) if strategy.is_sharded else 0

    def _differentiated(self, strategy: Strategy, values: list[Tensor], form: TreeSpec) -> _Gathered:
        inputs = [value.requires_grad_(value.is_floating_point()) for value in values]
        floating = [value for value in inputs if value.requires_grad]
        seed_forward(self._seed, self.world.device, self._private)
        with strategy.gradient_sync(last=False), self.precision.autocast():
            losses = by_head(strategy.forward(tree_unflatten(inputs, form), self.task.loss))
            gradients = {}
            for head, loss in losses.items():
                found = (
                    torch.autograd.grad(loss, floating, retain_graph=True, allow_unused=True)
                    if loss.requires_grad
                    else ()
                )
                by_tensor = dict(zip(map(id, floating), found, strict=False))
                gradients[head] = [by_tensor.get(id(value)) for value in inputs]
        is_used = leaves(losses).keys() - set(map(id, floating))
        detached = {head: loss.detach() for head, loss in losses.items()}
        return _Gathered([value.detach() for value in inputs], form, gradients, detached, bool(is_used))

    def _call(self, number: int, *, last: bool) -> Call:
        """A function of the model and the batch: the losses of the second pass of a micro-batch, by head.

        Their gradient is that of the loss over the global batch through the samples of this micro-batch. Their values
        add up to the loss, over micro-batches and ranks.

        Args:
            number: of the micro-batch in this step, from 0.
            last: whether it is the last of its shard. Its losses also have the gradient of parameters that the loss
                itself uses: 1 / shards of it in each shard.
        """
        gathered = self._gathered
        assert gathered is not None

        def losses(model: nn.Module, batch: Any) -> Losses:
            embedded, _ = tree_flatten(self.task.embed(model, batch))
            rows = [row[: len(self._places[number])] for row in embedded]
            if self._must_compare:
                self._compare(rows, number)
            direct: Losses = {}
            if last and gathered.uses_parameters:
                seed_forward(self._seed, self.world.device, self._private)
                direct = by_head(self.task.loss(model, tree_unflatten(gathered.values, gathered.form)))
            found = {}
            for head, gradients in gathered.gradients.items():
                value = gathered.losses[head]
                parts = [
                    (row.to(value.dtype) * gradient[self._places[number]].to(value.dtype)).sum()
                    for row, gradient in zip(rows, gradients, strict=True)
                    if gradient is not None
                ]
                parts += [direct[head] / self.world.data_size] if head in direct else []
                total = torch.stack(parts).sum() if parts else torch.zeros_like(value)
                shown = value if number == self._carrier else torch.zeros_like(value)
                found[head] = total - total.detach() + shown
            self._must_compare = self._must_compare and not last
            return found

        return losses

    def _compare(self, rows: Sequence[Tensor], number: int) -> None:
        """Check that both passes give the same embeddings.

        Raises:
            TrainingError: they differ.
        """
        gathered, near = self._gathered, _NEAR[self.precision.name]
        for row, value in zip(rows, gathered.values if gathered else (), strict=True):
            before, now = value[self._places[number]].double(), row.detach().double()
            atol = near * float(before.nan_to_num(0.0).abs().max()) if before.numel() else 0.0
            if not torch.allclose(before, now, rtol=0.0, atol=atol, equal_nan=True):  # NaN is found with the losses
                raise TrainingError(
                    "the embeddings of a batch differ between the pass without and the pass with gradient",
                    where=f"Task.embed, rank {self.world.rank}",
                    remedy="draw random numbers from torch's global generator only, and keep state in buffers",
                )


def _rows(embedded: Any, count: int) -> tuple[list[Tensor], TreeSpec]:
    """The tensors that `Task.embed` returned, and how it nests them.

    Raises:
        TrainingError: a value is not a tensor, or a tensor has no row for each of the `count` samples.
    """
    leaves_of, form = tree_flatten(embedded)
    for leaf in leaves_of or [None]:
        what = f"a {type(leaf).__name__}" if not isinstance(leaf, Tensor) else f"a tensor of shape {tuple(leaf.shape)}"
        if isinstance(leaf, Tensor) and leaf.is_complex():
            remedy = "return real numbers: torch.view_as_real(embedding)"
            raise TrainingError("it returned complex numbers", where="Task.embed", remedy=remedy)
        if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != count:
            raise TrainingError(
                f"it returned {what} for a batch of {number_of(count, 'sample')}",
                where="Task.embed",
                remedy="return tensors whose first dimension is the batch, or dicts, tuples and lists of them",
            )
    return leaves_of, form
