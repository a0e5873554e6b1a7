"""Does a model that is sharded over tensor groups equal the whole one? If not: the first difference."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import LockstepError, UsageError
from lockstep.core.parallel.sharded_tensor import gather, local
from lockstep.core.parallel.world import World, join_world
from lockstep.core.run_model import build_model, seed_everything
from lockstep.core.task import needs_global_batch
from lockstep.mesh.layout import laid_out
from lockstep.parts.digest import Digest
from lockstep.parts.replicas import StateDigests
from lockstep.trainer.trainer import Trainer
from lockstep_lab.verify.by_index import task_of
from lockstep_lab.verify.comparable_task import ComparableTask, TaskChanges, sum_of_heads
from lockstep_lab.verify.recorder import Recording
from lockstep_lab.verify.reference import data

_ROUNDINGS = 1000.0
_SAMPLES = 8
Outputs = dict[tuple[str, int], list[Tensor]]
"""By the name of a module and the number of its call: the tensors that it returned, in the order of their ends."""


def examined(experiments: Any) -> str:
    """What `first_difference` reports about the config of `experiments`. Empty: nothing, or its ranks form no mesh."""
    if experiments.groups == experiments.nproc:
        return ""
    config = experiments.short_config(parallel__param_dtype=None, parallel__reduce_dtype=None)
    more = config, experiments.exact_changes(), experiments.probe().epsilon
    return next(filter(None, experiments.run("cut-model", experiments.nproc, first_difference, *more)), "")


def other_batches(experiments: Any, recordings: Sequence[Recording]) -> str:
    """A complaint if the ranks of a tensor group get different batches; else empty."""
    tensor = experiments.nproc // experiments.groups
    for rank, recording in enumerate(recordings):
        if recording.batches != recordings[rank - rank % tensor].batches:
            return f"ranks {rank - rank % tensor} and {rank} are in one tensor group, but get different batches"
    return ""


def parts(name: str, tensor: Tensor, shares: Sequence[StateDigests]) -> Iterator[tuple[Tensor, Digest]]:
    """The shards of a whole tensor on the ranks, and their digests."""
    for share in shares:
        for key in [key for key in share if key.partition("[")[0] == name]:
            start, rows, digest = share[key]
            columns = slice(*map(int, key[len(name) + 4 : -1].split(":"))) if key != name else slice(None)
            held = tensor[start : start + rows] if tensor.ndim else tensor
            yield (held[:, columns].contiguous() if key != name else held), digest


def first_difference(config: Mapping[str, Any], changes: TaskChanges, epsilon: float) -> str:
    """Words for the first module whose output differs between the sharded and the whole model, or for the gradient that
    differs most. Empty: on this rank, none does. All ranks call it.

    Both models have the same weights and get the same samples.

    Raises:
        UsageError: the config or the plan does not fit a mesh, or a module fails in the sharded model; names it.
    """
    trainer = Trainer(config, quiet=True)
    task, other = (ComparableTask(task_of(trainer), changes) for _ in range(2))  # a task may keep its model
    if task.players or needs_global_batch(task):
        trainer.config.parallel.without_mesh("a task with players or Task.embed")
    with join_world(trainer.config.device) as ranks:
        world = laid_out(ranks, trainer.config)
        strategy = build_model(trainer.config, task, world, steps_per_epoch=1).strategy
        cut, whole = strategy.unwrapped.model, other.model().to(world.device).train()
        _take_values(whole, cut)
        of_task: Any = task.train_data()
        chosen = range(min(_SAMPLES, len(of_task)))
        samples = data.read(task, of_task, chosen, epoch=0, training=True, seed=trainer.config.seed, skip=True)
        batch = data.to_device(task.collate(samples), world.device)
        seed_everything(trainer.config)
        with _outputs(whole) as (expected, _):
            loss = sum_of_heads(data.losses(other, whole, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        strategy.forward.train()
        seed_everything(trainer.config)
        with _outputs(cut) as (found, entered), strategy.gradient_sync(True):
            try:
                losses = strategy.forward(batch)
                factors = {head: torch.ones_like(value) for head, value in losses.items() if value.requires_grad}
                strategy.backward(losses, factors, True)
            except LockstepError:
                raise
            except Exception as error:
                what = f"{entered[-1] if entered else 'Task.loss'} fails in the sharded model: {error}"
                where = f"parallel.tensor={world.tensor}"
                raise UsageError(
                    what.splitlines()[0], where=where, remedy="see lockstep --explain mesh, The plan"
                ) from error
        grads = {name: gather(p.grad) for name, p in cut.named_parameters() if p.grad is not None}
        return _in_outputs(expected, found, world, epsilon) or _in_gradients(whole, grads, epsilon)


def _take_values(whole: nn.Module, cut: nn.Module) -> None:
    """Give the whole model the weights and buffers of the sharded model. All ranks call it."""
    parameters, buffers = dict(cut.named_parameters()), dict(cut.named_buffers())
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.requires_grad_(parameters[name].requires_grad).copy_(gather(parameters[name]))
        for name, buffer in whole.named_buffers():
            buffer.copy_(buffers[name])


@contextlib.contextmanager
def _outputs(model: nn.Module) -> Iterator[tuple[Outputs, list[str]]]:
    """Inside, the outputs of each module, and the names of the modules whose calls a pass is in."""
    found: Outputs = {}
    entered: list[str] = []
    calls = Counter[str]()

    def leave(name: str, _: nn.Module, __: Any, output: Any) -> None:
        calls[entered.pop()] += 1
        found[name, calls[name]] = [local(tensor.detach()).clone() for tensor in data.tensors(output)]

    handles = []
    for name, module in model.named_modules():
        name = name or type(module).__name__
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: entered.append(name)))
        handles.append(module.register_forward_hook(partial(leave, name)))
    try:
        yield found, entered
    finally:
        for handle in handles:
            handle.remove()


def _in_outputs(expected: Outputs, found: Outputs, world: World, epsilon: float) -> str:
    before = ""
    for (name, call), tensors in expected.items():
        for whole, cut in zip(tensors, found.get((name, call), []), strict=False):
            part = _part_of(whole, cut.shape, world)
            if part is None or not part.is_floating_point():
                continue
            apart = torch.where((part == cut) | (part.isnan() & cut.isnan()), 0, part.double() - cut)  # masks have inf
            off = float(apart.norm() / part.double()[part.isfinite()].norm().clamp(min=1e-300))
            if not off <= _ROUNDINGS * epsilon:
                right = f", and {before} before it is correct" if before else ""
                return (
                    f"The plan does not fit the model: the first module that differs is {name} ({off:.2g} off){right}. "
                    "A softmax or a norm may span sharded outputs there, or the plan may lack layers that belong "
                    "together"
                )
            before = name
    return ""


def _part_of(whole: Tensor, shape: torch.Size, world: World) -> Tensor | None:
    """The shard of an output that this rank should have, of this shape. None: unknown.

    It is the whole output, or this rank's share of one dimension. The first dimension is that of samples and never
    sharded.
    """
    if whole.shape == shape:
        return whole
    ends = range(1, whole.ndim if whole.ndim == len(shape) else 0)
    cut = [place for place in ends if whole.shape[place] == world.tensor * shape[place]]
    if len(cut) != 1 or sum(a != b for a, b in zip(whole.shape, shape, strict=True)) != 1:
        return None
    return whole.chunk(world.tensor, cut[0])[world.rank % world.tensor]


def _in_gradients(whole: nn.Module, grads: Mapping[str, Tensor], epsilon: float) -> str:
    expected = {name: p.grad.double() for name, p in whole.named_parameters() if p.grad is not None}
    apart = {name: float((grad - grads[name]).norm()) for name, grad in expected.items() if name in grads}
    length = sum(float(grad.square().sum()) for grad in expected.values()) ** 0.5 or 1.0
    worst = max(apart, key=lambda name: (apart[name] != apart[name], apart[name]), default="")  # NaN is the worst
    if not worst or apart[worst] <= _ROUNDINGS * epsilon * length:
        return ""
    return (
        f"The plan does not fit the model: all modules return the whole model's outputs, but the gradient of {worst} "
        f"is {apart[worst] / length:.2g} of the whole gradient off. A module that works on its rank's shard, such as a "
        "norm within each head, needs the style replicated_with_grad_allreduce"
    )
