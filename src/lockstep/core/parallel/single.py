"""One rank that trains by itself: the simplest strategy, and the defaults of the others."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core import devices
from lockstep.core.errors import TrainingError, UsageError, listed, number_of
from lockstep.core.parallel.buffers import ModuleBuffers, restored_state
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.strategy import Forward, Losses, TrialPass, Waits
from lockstep.core.parallel.untrained import UntrainedLeaves
from lockstep.core.parallel.world import World

_requires_grad = operator.attrgetter("requires_grad")


class Single:
    """A full copy of the model on this rank, and no exchange of gradients. For the methods, see `Strategy`.

    Args:
        find_unused_parameters: some trainable parameters get no gradient in some batches; nothing is checked then.
    """

    is_sharded = False
    forward: nn.Module
    unwrapped: Forward
    """The `Forward` inside the wrapper, or `forward` itself."""
    gives_buffers = True
    """`begin_step` gives every rank the buffers of rank 0. False: another strategy of the same model does."""

    def __init__(self, world: World, find_unused_parameters: bool = False) -> None:
        self.world, self.find_unused_parameters = world, find_unused_parameters
        self.device = devices.of(world.device)
        self._must_check_used = not find_unused_parameters  # the next step checks that each parameter has a gradient
        self.trainable: dict[str, nn.Parameter] = {}
        """The parameters whose gradients are exchanged."""
        self._frozen: dict[str, nn.Parameter] = {}  # the other parameters
        self._parameters: dict[str, nn.Parameter] = {}  # as `wrap` found them
        self._buffers: ModuleBuffers | None = None
        self._untrained: UntrainedLeaves | None = UntrainedLeaves(self._holders)  # None: it has seen enough
        self._looks_for_replaced = 8  # before and after the first step, and after an evaluation before it
        self._looks_at_shapes = 4  # how often `_sync_buffers` still looks: before the first step, and after it
        self._first_shapes: list[tuple[int, ...]] | None = None
        self._shapes_vary = False

    @property
    def divisor(self) -> int:
        return self.world.replicas

    def build_model(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, list[str]]:
        model = make()
        if not self.device.has_float64:
            _check_no_float64(model)
        return model.to(self.world.device), []

    def wrap(self, forward: Forward, blocks: Sequence[nn.Module] = ()) -> None:
        self.forward = self.unwrapped = forward
        self._parameters = self._parameters or dict(forward.model.named_parameters())
        self._note_trainable()

    def _note_trainable(self) -> None:
        self._must_check_used = not self.find_unused_parameters
        by_name = dict(self.unwrapped.model.named_parameters())
        self.trainable = {name: p for name, p in by_name.items() if p.requires_grad}
        self._frozen = {name: p for name, p in by_name.items() if not p.requires_grad}

    def begin_step(self, trial: TrialPass | None = None) -> Any:
        if self._looks_for_replaced:
            self._looks_for_replaced -= 1
            self._check_kept()
        self._sync_buffers()
        if trial is None:
            return None
        if self._untrained is not None:
            self._untrained.begin(self._own_leaves())
        self._take_waits()  # of an evaluation
        mark = self.device.mark() if self.world.size > 1 else None
        self._warm_up(trial)
        return mark

    def _warm_up(self, trial: TrialPass) -> None:
        """Run what must run once before the first step, and after other parameters became trainable."""

    def begin_shard(self, place: int, micro_batches: int) -> None:
        pass

    def end_shards(self) -> None:
        pass

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, losses: Losses, factors: Losses, last: bool) -> Waits | None:
        waits = None
        if last:
            self._check_trainable()
            if self._must_check_used:
                self._check_all_used({head: losses[head] for head in factors})
            if self._untrained is not None:
                self._untrained.check_graph(leaves(losses).values(), self._own_leaves())
        roots, gradients = self._roots(losses, factors, last)
        # A CUDA graph writes gradients into memory that its next run overwrites, and torch keeps a first one in place.
        new = [p for p in self.trainable.values() if p.grad is None] if self.unwrapped.uses_graphs and not last else []
        if last and self.world.size > 1:
            waits = Waits(self.device.mark(), self._take_waits())
        if roots:
            torch.autograd.backward(roots, gradients)
        for parameter in new:
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        if last:
            if self._untrained is not None and self._untrained.check_gradients():
                self._untrained = None
            self._check_reduced()
        return waits

    def _holders(self) -> dict[str, Any]:
        return {**self.unwrapped.holders(), "model": self.unwrapped.model}

    def _own_leaves(self) -> set[int]:
        """`id` of the leaves whose gradients the optimizer uses, or that are frozen."""
        return {id(parameter) for each in (self.trainable, self._frozen) for parameter in each.values()}

    def _take_waits(self) -> list[tuple[Any, Any]] | None:
        """What `Waits.between` says, since the last call."""
        return []

    def _roots(self, losses: Losses, factors: Losses, last: bool) -> tuple[list[Tensor], list[Tensor]]:
        """The arguments of `torch.autograd.backward` for the gradient of sum_k factors[k] * losses[k].

        Raises:
            TrainingError: see `_zero_roots`.
        """
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for head, factor in factors.items():
            if losses[head].requires_grad:
                roots.append(losses[head])
                gradients.append(factor)
        if len(roots) < len(factors):  # a head without units may be a constant
            constants = [head for head in factors if not losses[head].requires_grad]
            parameters = self._zero_roots(losses, constants, last)
            roots += parameters
            gradients += [torch.zeros_like(parameter) for parameter in parameters]
        return roots, gradients

    def _zero_roots(self, losses: Losses, constants: Sequence[str], last: bool) -> list[nn.Parameter]:
        """Parameters that no loss reaches because the losses of some heads are constants.

        In the last backward pass of a step they need gradients of zeros, because the other ranks wait for them.

        Args:
            constants: the heads whose losses depend on no parameter.

        Raises:
            TrainingError: the strategy cannot train with a constant loss.
        """
        return [self.trainable[name] for name, unused in self._unused_parameters(losses).items() if unused and last]

    def _check_trainable(self) -> None:
        """Check that exactly the parameters whose gradients are exchanged are trained.

        Raises:
            TrainingError: code of the task or of the model has frozen or unfrozen parameters; names them.
        """
        in_pass, train, frozen = self._changed_while_gathered(), self.trainable.values(), self._frozen.values()
        if not in_pass and all(map(_requires_grad, train)) and not any(map(_requires_grad, frozen)):
            return
        changed = {
            "unfrozen": [name for name, p in self._frozen.items() if p.requires_grad or id(p) in in_pass],
            "frozen": [name for name, p in self.trainable.items() if not p.requires_grad or id(p) in in_pass],
        }
        shown = "; ".join(f"{word} were {listed(names)}" for word, names in changed.items() if names)
        raise TrainingError(
            f"a forward pass has changed which parameters train (requires_grad): {shown}",
            where=f"step {self.world.heartbeat.step + 1}, Task.loss or the model",
            remedy="let train.unfreeze say from which step on parameters train, and freeze the others in Task.model; "
            "to keep gradients from a part of the model for one loss, use detach() or torch.no_grad()",
        )

    def _changed_while_gathered(self) -> set[int]:
        """`id` of the parameters whose `requires_grad` was changed on the tensor that replaces them in a pass.

        If parameters are not gathered, a pass uses the parameters themselves, and the set is empty.
        """
        return set()

    def _check_all_used(self, losses: Losses) -> None:
        """Raise if the losses on some rank do not depend on some trainable parameter. A collective.

        It reads the autograd graph before the backward pass. Once DDP has begun to reduce, ranks that use different
        parameters pair their collectives wrongly, which gloo does not always notice.

        Raises:
            TrainingError: on every rank; names the parameters and the remedy.
        """
        self._check_kept()
        check_dense(losses, {id(parameter): name for name, parameter in self.unwrapped.model.named_parameters()})
        has_constants = any(not loss.requires_grad for loss in losses.values())  # see `_zero_roots`
        unused = self._unused_parameters(losses)
        unused_on = self.world.all_sum([float(is_unused and not has_constants) for is_unused in unused.values()])
        names = [name for name, ranks in zip(unused, unused_on, strict=True) if ranks]
        if names:
            ranks = int(max(unused_on))
            when = "" if ranks == self.world.size else f" on {ranks} of {self.world.size} ranks"
            if any(type(node).__name__ == "CheckpointFunctionBackward" for node in _nodes(losses)):
                when += (
                    " in the graph of the loss, which ends at a reentrant checkpoint (pass use_reentrant=False to it)"
                )
            raise unused_error(names, "first step", when)
        self._must_check_used = False

    def _check_kept(self) -> None:
        if names := self._replaced():
            raise TrainingError(
                "code of the model or the loss replaces parameters with new objects. The optimizer does not "
                f"have these objects, so they would never be trained: {listed(names)}",
                where="Task.model",
                remedy="change the values of the parameter (parameter.copy_ within torch.no_grad()), or compute a "
                "tensor from it and use that; torch.nn.utils.parametrize does so at each access",
            )

    def _check_reduced(self) -> None:
        """After the last backward pass of a step: raise if the strategy still waits for gradients of this rank.

        Raises:
            TrainingError: this rank did not use some trainable parameters, and other ranks may have. Names them.
        """

    def leaves(self) -> dict[str, Tensor]:
        return dict(self.trainable)

    def backward_alone(self, losses: Losses, factors: Losses) -> None:
        roots, gradients = self._roots(losses, factors, last=False)
        if roots:
            torch.autograd.grad(roots, list(self.trainable.values()), gradients, allow_unused=True)

    @contextlib.contextmanager
    def inference(self) -> Generator[Forward, None, None]:
        yield self.unwrapped

    def _sync_buffers(self) -> None:
        if self.world.size > 1 and self.gives_buffers:
            if self._buffers is None:
                self._buffers = ModuleBuffers(self.unwrapped)
            if self._looks_at_shapes or self._shapes_vary:
                self._agree_on_shapes(list(self._buffers))
            self.world.broadcast_tensors(list(self._buffers))

    def _agree_on_shapes(self, buffers: list[Tensor]) -> None:
        """Give buffers the shapes that they have on rank 0, if the first steps of a process change shapes."""
        shapes = [tuple(buffer.shape) for buffer in buffers]
        if not self._shapes_vary:
            self._looks_at_shapes -= 1
            self._first_shapes = self._first_shapes if self._first_shapes is not None else shapes
            self._shapes_vary = bool(self.world.all_max(int(shapes != self._first_shapes)))
        if self._shapes_vary:
            of_rank0 = self.world.broadcast(shapes)
            if len(of_rank0) != len(buffers):
                raise TrainingError(
                    f"rank {self.world.rank} has {number_of(len(buffers), 'buffer')}, and rank 0 has {len(of_rank0)}",
                    where="Task.model",
                    remedy="register the same buffers on all ranks",
                )
            for buffer, shape in zip(buffers, of_rank0, strict=True):
                if tuple(buffer.shape) != shape:
                    buffer.data = buffer.new_empty(shape)

    def pass_of_zeros(
        self,
        batch: Any,
        precision: Precision,
        ignored_heads: Sequence[str] = (),
        check: Callable[[Losses], None] | None = None,
    ) -> None:
        """A forward and a backward pass of zeros, which leaves no gradient and no change of the model.

        Args:
            ignored_heads: heads whose losses may be constants.
            check: is called with the losses before the backward pass.
        """
        with restored_state(self.unwrapped, "zeros"):
            with precision.autocast():
                losses: Losses = self.forward(batch)
            losses = {head: loss for head, loss in losses.items() if loss.requires_grad or head not in ignored_heads}
            if check is not None:
                check(losses)
            zeros = {head: torch.zeros_like(loss) for head, loss in losses.items()}
            torch.autograd.backward(*self._roots(losses, zeros, last=True))
        for parameter in self.forward.parameters():
            parameter.grad = None

    def _replaced(self) -> list[str]:
        """Names of trainable parameters in whose place the model has other objects than the optimizer."""
        now = dict(self.unwrapped.model.named_parameters(remove_duplicate=False))
        return [
            name
            for name, parameter in self._parameters.items()
            if name in now and now[name] is not parameter and (parameter.requires_grad or now[name].requires_grad)
        ]

    def _unused_parameters(self, losses: Losses) -> dict[str, bool]:
        """For each trainable parameter: whether no loss depends on it."""
        used = leaves(losses)
        return {name: id(p) not in used for name, p in self.unwrapped.model.named_parameters() if p.requires_grad}


def _check_no_float64(model: nn.Module) -> None:
    """Raises UsageError if a parameter or buffer is float64, which the device does not have."""
    named = (*model.named_parameters(), *model.named_buffers())
    names = [name for name, tensor in named if tensor.dtype in (torch.float64, torch.complex128)]
    if names:
        raise UsageError(
            f"mps has no float64, and these tensors of the model are float64: {listed(names, 5)}",
            where="device=mps",
            remedy="make the model in float32, or use device=cpu",
        )


def leaves(losses: Losses) -> dict[int, Tensor]:
    """The leaf tensors that `losses` depend on, by their identity (`id`)."""
    variables = (getattr(node, "variable", None) for node in _nodes(losses))
    return {id(variable): variable for variable in variables if isinstance(variable, Tensor)}


def _nodes(losses: Losses) -> Iterator[Any]:
    """All nodes of the graph of `losses`, each of them once."""
    seen: set[Any] = set()
    pending = [loss.grad_fn for loss in losses.values()]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending.extend(parent for parent, _ in node.next_functions)


def check_dense(losses: Losses, names: Mapping[int, str]) -> None:
    """Raise if a parameter gets a sparse gradient by a function (`functional.embedding`, `gather`).

    Args:
        names: of the parameters, by identity.

    Raises:
        TrainingError: names the parameters.
    """
    found = []
    for node in _nodes(losses):
        if getattr(node, "_saved_sparse", False) or getattr(node, "_saved_sparse_grad", False):
            parents = (getattr(parent, "variable", None) for parent, _ in node.next_functions)
            found += [names.get(id(leaf), "a parameter") for leaf in parents if isinstance(leaf, Tensor)]
    if found:
        raise TrainingError(
            f"{listed(sorted(set(found)), 5)} would have sparse gradients: most optimizers cannot use them",
            where="Task.loss, Task.model",
            remedy="call functional.embedding with sparse=False, gather with sparse_grad=False: they learn the same",
        )


def unused_error(names: Sequence[str], where: str, when: str = "") -> TrainingError:
    """The error about trainable parameters without gradient. `when` follows the number of parameters: " on 1 rank"."""
    return TrainingError(
        f"{number_of(len(names), 'trainable parameter')} got no gradient{when}: {listed(names)}",
        where=where,
        remedy="use them in the loss, freeze them (requires_grad_(False)), "
        "or, with ddp, set parallel.find_unused_parameters=true if each batch uses different parts of the model",
    )


def constant_loss_error(head: str, where: str) -> TrainingError:
    """The error about a head whose loss depends on no parameter, under a strategy that cannot train with it."""
    return TrainingError(
        f"the loss of head {head!r} is a constant, which depends on no parameter",
        where=where,
        remedy="let it depend on its parameters if it has no units, "
        "such as a sum over an empty selection of the model's output",
    )
