"""The model of a task as a training wraps it: with tensors without values, or with real ones."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from lockstep.core import run_model, task_checks
from lockstep.core.blocks import find_ends
from lockstep.core.errors import UsageError
from lockstep.core.parallel.meta_init import take_values
from lockstep.core.parallel.world import World as Ranks
from lockstep.mesh import alone as mesh

if TYPE_CHECKING:
    from lockstep.core.config.sections import RunConfig
    from lockstep.core.task import Task

_LAST = 2**60  # a step after all parameters are unfrozen
_CPU = torch.device("cpu")


class Built(NamedTuple):
    """A model, its optimizer, and notes on what is not modelled."""

    forward: Any
    """From a batch to losses."""
    model: nn.Module
    blocks: dict[str, nn.Module]
    ends: tuple[list[nn.Module], list[nn.Module]]
    """What FSDP gathers separately before and after the blocks."""
    optimizer: torch.optim.Optimizer
    optimizer_of_fp16: torch.optim.Optimizer
    """The same, as fp16 training makes it: without torch's fused kernels."""
    notes: list[str]
    exchanged: list[tuple[str, int]]
    """Collectives of the tensor group in passes since the list was last emptied: name, and bytes of the tensor."""

    @property
    def units(self) -> list[nn.Module]:
        """What FSDP gathers separately, in the order of a forward pass."""
        return [*self.ends[0], *self.blocks.values(), *self.ends[1]]


def alone() -> Ranks:
    """A world with a single rank, on the CPU."""
    return Ranks(rank=0, size=1, local_rank=0, device=_CPU)


def on_one_rank(config: RunConfig) -> RunConfig:
    """The config of one process on the CPU, without settings that do not affect traced bytes."""
    off = {"compile": None, "compile_mode": "default", "activation_checkpointing": False, "channels_last": False}
    return config.model_copy(
        update={
            "device": "cpu",
            "data": config.data.model_copy(update={"workers": 0}),
            "parallel": config.parallel.model_copy(update={"strategy": "single", "cpu_offload": False}),
            "compute": config.compute.model_copy(update=off),
        }
    )


def without_values(task: Task, config: RunConfig, fake: FakeTensorMode, *, gpu: bool) -> Built:
    """The model with tensors without values: made without values, or else made in full and emptied.

    Args:
        fake: the mode that makes its tensors.
        gpu: whether the optimizer is that of a GPU.

    Raises:
        UsageError: the model is made lazily.
    """
    cause: Exception | None = None
    for makes in (fake, torch.device("meta")):
        try:
            with makes:
                model = task_checks.model(task)
            return _wrapped(task, config, _emptied(model, fake), fake, gpu=gpu)
        except Exception as error:
            cause = error
    gc.collect()
    model = task_checks.model(task)
    _check_not_lazy(model)
    built = _wrapped(task, config, _emptied(model, fake), fake, gpu=gpu)
    note = f"the model cannot be made without values ({type(cause).__name__}), so it was made in full on this machine"
    return built._replace(notes=[note, *built.notes])


def _check_not_lazy(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            what = f"the model is made lazily: {name} has no shape before the first forward pass"
            remedy = "give the layer its sizes, such as nn.Linear(10, 16) for nn.LazyLinear(16)"
            raise UsageError(what, where="Task.model", remedy=remedy)


def _emptied(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """The model with tensors of `fake` on the CPU instead of others. Tied tensors stay tied."""
    take_values(model)
    made: dict[int, Tensor] = {}
    with fake:
        for module in model.modules():
            for holder in (module._parameters, module._buffers):
                for key, tensor in holder.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    holder[key] = made[id(tensor)]  # type: ignore[assignment]
    return model


def with_values(task: Task, config: RunConfig, *, gpu: bool) -> Built:
    """The model with real tensors, as the task makes it."""
    run_model.seed_everything(config)
    return _wrapped(task, config, task_checks.model(task), None, gpu=gpu)


def _wrapped(task: Task, config: RunConfig, model: nn.Module, fake: FakeTensorMode | None, *, gpu: bool) -> Built:
    """The model as a training wraps it, by the functions of a training."""
    small = on_one_rank(config)
    notes, exchanged = list[str](), list[tuple[str, int]]()
    vars(task)["model"] = lambda: model
    vars(model)["to"] = lambda *_, **__: model  # it is already there, and torch cannot move tensors without values
    try:
        with fake or contextlib.nullcontext():
            built = run_model.build_model(small, task, alone(), steps_per_epoch=1, step=_LAST)
            whole = built.strategy.unwrapped.model
            blocks = {name: whole.get_submodule(name) for name in built.blocks}
            ends = ([], []) if config.parallel.shard_modules else find_ends(whole, list(blocks.values()))
            if (ranks := config.parallel.tensor) > 1:
                notes += mesh.part_of(whole, task.tensor_plan(), ranks, lambda *each: exchanged.append(each))
                ends = ends[0], [end for end in ends[1] if not hasattr(end.weight, "cut_over")]
            make = partial(run_model.make_optimizer, small, task, whole, built.blocks)
            optimizer, of_fp16 = make(fuses_adam=gpu), make(fuses_adam=False)
    finally:
        del vars(task)["model"], vars(model)["to"]
    if gpu:  # torch's default kernels on a GPU
        for group in (*optimizer.param_groups, *of_fp16.param_groups):
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = config.parallel.tensor == 1
    if config.train.unfreeze:
        notes.append("train.unfreeze: the plan covers the last phase, in which all its parameters train")
    if config.compute.compile:
        notes.append("compute.compile is not modelled: compiled code needs different temporary tensors, mostly fewer")
    if config.compute.channels_last:
        notes.append("compute.channels_last is not modelled: the bytes stay the same, but some kernels copy")
    return Built(built.strategy.forward, whole, blocks, ends, optimizer, of_fp16, notes, exchanged)


@contextlib.contextmanager
def gathered_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, `model` has parameters of `dtype`, as under FSDP with `parallel.param_dtype`. Tied ones stay tied."""
    stored = [module._parameters.copy() for module in model.modules()]
    made: dict[int, nn.Parameter] = {}
    try:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.is_floating_point():
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        yield
    finally:
        for module, parameters in zip(model.modules(), stored, strict=True):
            module._parameters.update(parameters)
