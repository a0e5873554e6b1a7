"""The model and the optimizer of a run, as its config says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from lockstep.core import batch_norm, optimizer_class, plugins, task_checks
from lockstep.core.blocks import compile_modules, find_blocks, recompute_activations
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import TrainingError, UsageError, listed
from lockstep.core.history import MetricHistory
from lockstep.core.optim import build_optimizer
from lockstep.core.parallel import equal_bits, held_parameters
from lockstep.core.parallel.factory import make_strategy
from lockstep.core.parallel.no_collectives import no_collectives
from lockstep.core.parallel.strategy import Forward, Strategy
from lockstep.core.parallel.untrained import variables_of_script, variables_of_task
from lockstep.core.parallel.world import World
from lockstep.core.schedule import Schedule, ScheduleConfig, scaled_lr
from lockstep.core.task import Task, loss_of_batch, needs_global_batch
from lockstep.core.unfreeze import Unfreezing


class SpreadModel(NamedTuple):
    """A model on this rank, and what is known of it."""

    strategy: Strategy
    """How the model is spread over ranks. It holds the model, and the module that runs it."""
    blocks: list[str]
    """Names of the model's repeated blocks."""
    unfreezing: Unfreezing | None
    messages: list[str]
    """Lines about the model for the log."""


def seed_everything(config: RunConfig) -> None:
    """Seed torch, NumPy and Python, so that a task draws the same data and the same model in every process."""
    torch.manual_seed(config.seed)
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)


def build_model(
    config: RunConfig,
    task: Task,
    world: World,
    *,
    steps_per_epoch: int | None = None,
    step: int = 0,
    is_bypassed: bool = False,
) -> SpreadModel:
    """The task's model, with the weights that the task gave it.

    Args:
        steps_per_epoch: steps of an epoch, if the model will be trained. None: the model only runs forward.
        step: step at which training begins or resumes.
        is_bypassed: see `Forward`.

    Raises:
        TrainingError: the model has no trainable parameters, or parameters that cannot be trained.
        UsageError: the config does not fit the model or the ranks; sharding would break what the task does with
            parameters.
    """
    parallel, compute = config.parallel, config.compute
    training = steps_per_epoch is not None
    strategy = make_strategy(parallel, world, trains=training and not task.players)  # a player has its own
    seed_everything(config)
    notes: list[str] = []

    def make() -> nn.Module:
        with no_collectives():
            made = task_checks.model(task)
        made, notes[:] = batch_norm.without_unsupported(_check_parameters(made), world)
        if training:
            notes.extend(held_parameters.check_hooks(made, ranks=world.size, sharded=strategy.is_sharded))
            held_parameters.check_renormalised(made, ranks=world.size)
        if strategy.is_sharded:
            held_parameters.check_references(made, task)
            held_parameters.check_shared_memory(made)
            if training:
                held_parameters.check_elements(made)
        return made

    model, messages = strategy.build_model(make)
    messages += notes
    # Shards are contiguous. With virtual ranks, a run that is sharded on several ranks computes the same on one rank.
    is_sharded = strategy.is_sharded or (parallel.virtual_ranks is not None and parallel.strategy == "fsdp")
    if compute.channels_last and not is_sharded:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.zero_grad(set_to_none=True)  # the first step would add to gradients that a task has left
    blocks = find_blocks(model, parallel.shard_modules)
    unfreezing = None
    if steps_per_epoch is not None:
        unfreezing = _unfreezing(config, task, model, list(blocks), steps_per_epoch=steps_per_epoch, step=step)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            remedy = "set requires_grad_(True) on some parameters, or unfreeze fewer of them later"
            raise TrainingError("the model has no trainable parameter", where="Task.model", remedy=remedy)
    if training and compute.activation_checkpointing:
        recompute_activations(list(blocks.values()), world.device, compute, model)
    if compute.compile is not None:
        compile_modules(model, list(blocks.values()), compute)
    strategy.wrap(_forward(config, task, model, is_bypassed=is_bypassed), list(blocks.values()))
    return SpreadModel(strategy, list(blocks), unfreezing, list(messages))


def _forward(config: RunConfig, task: Task, model: nn.Module, *, is_bypassed: bool) -> Forward:
    """The module that strategies wrap."""
    return Forward(
        model,
        loss_of_batch(task) if needs_global_batch(task) else task.loss,
        calls_vary=task.calls_vary,
        is_bypassed=is_bypassed,
        uses_graphs=config.compute.uses_cuda_graphs,
        tensor_plan=task.tensor_plan,
        holders=variables_of_script if is_bypassed else partial(variables_of_task, task),
    )


def _check_parameters(model: nn.Module) -> nn.Module:
    """Check that parameters and buffers of `model` have shapes and are dense, and gradients, too. Returns `model`.

    Raises:
        TrainingError: some module is lazy, of TorchScript or has sparse gradients, or a tensor is sparse; names them
            and the remedy.
    """
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise TrainingError(
            f"{scripted[0] or 'the model'} is a module of TorchScript, which cannot be trained or saved as others",
            where="Task.model",
            remedy="return the module itself, without torch.jit.script or torch.jit.trace; compute.compile=model makes "
            "it fast. For weights in a file: module.load_state_dict(torch.jit.load(file).state_dict())",
        )
    lazy = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if nn.parameter.is_lazy(value)]
    if lazy:
        raise TrainingError(
            f"the model is not complete: {', '.join(lazy[:5])} get a shape only when a batch passes through",
            where="Task.model",
            remedy="give lazy modules (LazyLinear, ...) their sizes, or pass a batch through the model",
        )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    layouts = {name: str(tensor.layout).removeprefix("torch.") for name, tensor in tensors.items()}
    scattered = [f"{name} ({layout})" for name, layout in layouts.items() if layout != "strided"]
    if scattered:
        raise TrainingError(
            f"{listed(scattered, 5)}: a model needs dense tensors, which other ranks and checkpoints get",
            where="Task.model",
            remedy="keep a sparse matrix as dense tensors, such as buffers of its indices and values, and make it "
            "of them in `forward`: torch.sparse_coo_tensor(self.indices, self.values, size)",
        )
    kinds = (nn.Embedding, nn.EmbeddingBag)
    sparse = [
        name or "the model"
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module.sparse and module.weight.requires_grad
    ]
    if sparse:
        raise TrainingError(
            f"{', '.join(sparse[:5])} would have sparse gradients: most optimizers and clipping cannot use them",
            where="Task.model",
            remedy="make the embedding with sparse=False: it learns the same",
        )
    return model


def _unfreezing(
    config: RunConfig, task: Task, model: nn.Module, blocks: Sequence[str], *, steps_per_epoch: int, step: int
) -> Unfreezing | None:
    """The phases of `train.unfreeze`, applied to the model. None: all parameters stay as the model made them.

    Raises:
        UsageError: a pattern matches no parameter, or a parameter trains that the task needs frozen.
    """
    unfreezing = Unfreezing(model, config.train.unfreeze, steps_per_epoch, blocks)
    unfreezing.check_frozen({pattern: epochs * steps_per_epoch for pattern, epochs in task.frozen_epochs.items()})
    if not config.train.unfreeze:
        return None
    unfreezing.apply(step)
    return unfreezing


def make_optimizer(
    config: RunConfig,
    task: Task,
    model: nn.Module,
    blocks: Sequence[str] = (),
    *,
    sharded: bool = False,
    fuses_adam: bool = False,
) -> torch.optim.Optimizer:
    """The task's or the config's optimizer, with learning rates scaled by the global batch.

    Args:
        blocks: names of the model's repeated blocks, in the model's order.
        sharded: whether each rank holds only shards of the parameters.
        fuses_adam: whether Adam and AdamW use their fused kernel, if `optim.fused` is None.

    Raises:
        UsageError: the optimizer cannot train shards: it needs whole matrices, or torch has no kernel for shards. Or
            its fused kernel cannot train a parameter on the CPU.
    """
    optim = config.optim
    scale = scaled_lr(
        1.0, optim.lr_scaling, global_batch=config.batch.global_ or 1, reference_batch=optim.reference_batch
    )
    made = build_optimizer(model, optim, scale=scale, fuses_adam=fuses_adam, blocks=blocks, make=task.optimizer)
    for member in optimizer_class.members(made):
        optimizer_class.watch_strides(member)
        if sharded:
            optimizer_class.check_shardable(member)
    equal_bits.check_optimizer(made, config.parallel)
    if len({getattr(parameter, "device_mesh", None) for parameter in model.parameters()}) > 1:
        for group in made.param_groups:  # torch's kernels over lists of tensors take those of one mesh
            group |= {"foreach": False} if "foreach" in group else {}
    return made


def make_schedule(
    config: ScheduleConfig, *, total: int, steps_per_epoch: int, of_task: Callable[[int], float] | None = None
) -> Schedule:
    """The schedule of a training.

    Args:
        total: updates of the whole training.
        steps_per_epoch: updates of an epoch.
        of_task: `Task.schedule`, if the task has this method.

    Raises:
        UsageError: the config's function cannot be found or returns no factor, or there are two schedules.
    """
    own = of_task
    if of_task is not None and config.name != ScheduleConfig().name:
        what = f"Task.schedule is the schedule, and the config has schedule.name={config.name}"
        raise UsageError(what, where="schedule.name", remedy="leave the key out, or Task.schedule")
    if ":" in config.name:
        own = plugins.named(config.name, key="schedule.name")
        if not callable(own):
            what = f"there is no function {config.name.rpartition(':')[2]!r}"
            raise UsageError(what, where=f"schedule.name={config.name}", remedy="correct the name")
    history = MetricHistory(config.plateau.metric) if config.plateau is not None else None
    made = Schedule(
        total=total,
        steps_per_epoch=steps_per_epoch,
        own=own,
        history=history,
        **config.model_dump(exclude={"plateau"}),
        plateau=config.plateau,
    )
    for update in (0, 1, total - 1) if own is not None else ():
        if made(update) != made(update):
            what = f"it returned two factors for update {update}"
            where = "schedule.name" if of_task is None else "Task.schedule"
            raise UsageError(what, where=where, remedy="compute the factor from the number of the update alone")
    return made
