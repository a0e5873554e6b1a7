"""From a config and a task to a model that is ready to run on these ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint import files
from lockstep.checkpoint import state as states
from lockstep.checkpoint.export import load_weights
from lockstep.checkpoint.store import Checkpoint
from lockstep.config import ParallelConfig, RunConfig
from lockstep.distributed import sharding, strategy
from lockstep.distributed.sharding import Sharding
from lockstep.distributed.strategy import Buckets, Forward
from lockstep.distributed.world import World
from lockstep.engine import task_checks
from lockstep.engine.blocks import compile_modules, find_blocks, recompute_activations
from lockstep.engine.optim import Group, build_optimizer
from lockstep.engine.schedule import scaled_lr
from lockstep.engine.step import TrainState
from lockstep.engine.unfreeze import Stage, Unfreezing
from lockstep.errors import TrainingError, UsageError
from lockstep.observe import factory
from lockstep.observe.model_summary import model_summary, warm_up_warning
from lockstep.observe.writer import RunInfo, Writer
from lockstep.tasks.task import Task

# Found by training with every class of torch.optim (tests/dist/test_sharding.py). Muon would train another model without a word.
_WHOLE_MATRICES = ("Muon", "Adafactor", "Rprop")
_NO_SHARDED_KERNEL = ("SGD", "Adagrad")


@dataclass
class BuiltModel:
    """A model on this rank. blocks: names of the repeated ones. told: for people."""

    model: nn.Module
    blocks: list[str]
    unfreezing: Unfreezing | None
    told: list[str]


def seed(config: RunConfig) -> None:
    """What a task draws while it makes its data or its model is the same in every process."""
    torch.manual_seed(config.seed)
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)


def assemble(
    config: RunConfig, task: Task, world: World, steps_per_epoch: int | None = None, step: int = 0, init: bool = False
) -> tuple[BuiltModel, nn.Module]:
    """The task's model with the weights that it makes itself, or with those of `train.init_from`; and what `strategy.wrap` made of it.

    Args:
        steps_per_epoch: to train it; None: only to run it forward.
        step: at which training begins or goes on.
        init: load `train.init_from`.

    Raises:
        TrainingError: nothing to train, or parameters that cannot be trained.
        UsageError: a config that does not fit the model or the ranks.
    """
    parallel, compute = config.parallel, config.compute
    training = steps_per_epoch is not None
    if training:
        strategy.resolve(parallel.strategy, world)
    # What only runs forward has no gradients to synchronise, so `single` will do on any number of ranks.
    sharded = parallel.strategy == "fsdp" and world.size > 1
    values: dict[str, Tensor] = {}
    told: list[str] = []
    seed(config)
    if sharded:
        model, values, told = sharding.build(lambda: _check_parameters(task_checks.model(task)), world)
    else:
        model = _check_parameters(task_checks.model(task)).to(world.device)
        if compute.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.zero_grad(
        set_to_none=True
    )  # a task may have trained it before, and left a gradient that the first step would add to
    blocks = find_blocks(model, parallel.shard_modules)
    unfreezing = None
    if steps_per_epoch is not None:
        unfreezing = _unfreezing(config, model, steps_per_epoch, step)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            remedy = "set requires_grad_(True) on some, or unfreeze fewer of them later"
            raise TrainingError("the model has no trainable parameter", where="Task.model", remedy=remedy)
    if training and compute.activation_checkpointing:
        recompute_activations(list(blocks.values()))
    if compute.compile is not None:
        compile_modules(model, list(blocks.values()), compute.compile, compute.compile_backend)
    forward: nn.Module = Forward(model, task.loss)
    if sharded or training:
        forward = strategy.wrap(
            forward, parallel.strategy, world, buckets(parallel), list(blocks.values()), _sharding(parallel)
        )
    if sharded:
        sharding.materialise(model, values, world, torch.device("cpu") if parallel.cpu_offload else world.device)
    if init and config.train.init_from:
        load_weights(model, Path(config.train.init_from), config.train.init_skip)
    return BuiltModel(model, list(blocks), unfreezing, told), forward


def _check_parameters(model: nn.Module) -> nn.Module:
    """`model`, where its parameters have shapes and dense gradients.

    Raises:
        TrainingError: names the modules that are lazy or sparse, and the remedy.
    """
    lazy = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if nn.parameter.is_lazy(value)]
    if lazy:
        raise TrainingError(
            f"the model is not complete: {', '.join(lazy[:5])} get a shape only when a batch passes through",
            where="Task.model",
            remedy="give lazy modules (LazyLinear, ...) their sizes, or pass a batch through before returning the model",
        )
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    sparse = [name or "the model" for name, one in embeddings.items() if one.sparse and one.weight.requires_grad]
    if sparse:
        raise TrainingError(
            f"{', '.join(sparse[:5])} would have sparse gradients, which most optimizers cannot use, nor can clipping",
            where="Task.model",
            remedy="make the embedding with sparse=False, which learns the same",
        )
    return model


def _unfreezing(config: RunConfig, model: nn.Module, steps_per_epoch: int, step: int) -> Unfreezing | None:
    stages = [
        Stage(stage.step or math.ceil((stage.epoch or 0) * steps_per_epoch), stage.match)
        for stage in config.train.unfreeze
    ]
    if not stages:
        return None
    unfreezing = Unfreezing(model, stages)
    unfreezing.apply(step)
    return unfreezing


def buckets(parallel: ParallelConfig) -> Buckets:
    """What the config says for DDP."""
    return Buckets(
        parallel.find_unused_parameters, parallel.static_graph, parallel.bucket_mb, parallel.gradient_as_bucket_view
    )


def _sharding(parallel: ParallelConfig) -> Sharding:
    return Sharding(
        parallel.reshard_after_forward,
        parallel.shard_ranks,
        parallel.cpu_offload,
        parallel.forward_prefetch,
        parallel.backward_prefetch,
        parallel.param_dtype,
        parallel.reduce_dtype,
    )


def optimizer(
    config: RunConfig, model: nn.Module, blocks: Sequence[str] = (), sharded: bool = False
) -> torch.optim.Optimizer:
    """As the config says, with learning rates scaled by the global batch.

    Raises:
        UsageError: an optimizer that cannot train shards: it looks at whole matrices, or torch has no kernel for it.
    """
    rate = config.optim
    fused = rate.fused or bool(rate.args.get("fused"))
    if sharded and (rate.name in _WHOLE_MATRICES or (fused and rate.name in _NO_SHARDED_KERNEL)):
        remedy = "use AdamW, SGD or another that updates each element by itself, or parallel.strategy=ddp"
        what = f"{'fused ' if rate.name in _NO_SHARDED_KERNEL else ''}{rate.name} cannot train sharded parameters"
        raise UsageError(what, where="optim.name", remedy=remedy)
    scale = scaled_lr(1.0, rate.lr_scaling, config.batch.global_ or 1, rate.reference_batch)
    groups = [Group(g.name, g.match, g.lr * scale if g.lr else None, g.weight_decay) for g in rate.groups]
    return build_optimizer(
        model, rate.name, rate.lr * scale, rate.weight_decay, groups, rate.args, rate.fused, rate.layer_decay, blocks
    )


def load(found: Checkpoint, model: nn.Module) -> None:
    """A checkpoint's weights: their average, where the run kept one."""
    states.check_fits(found.index, model)
    averages = dict(model.named_parameters())
    needed = states.wanted(found.index, model, averages=averages)
    for kind in ("model.", "ema."):
        part = {name: rows for name, rows in needed.items() if name.startswith(kind)}
        states.restore(files.read(found.path, found.index, part), found.values, model, averages=averages)


def open_writers(
    config: RunConfig,
    folder: Path,
    state: TrainState,
    *,
    stop: int,
    built: BuiltModel,
    log_header: Sequence[str],
    quiet: bool,
) -> list[Writer]:
    """The writers of a training, after they were given the lines on the data, the model and the schedule.

    Args:
        folder: the run directory.
        stop: step at which the training ends.
        log_header: lines of the task on its data.
        quiet: leave out the console.
    """
    world = state.world
    run = RunInfo(
        name=config.name,
        folder=folder,
        first_step=state.step,
        last_step=stop,
        world_size=world.size,
        device=world.device.type,
        config=config.model_dump(by_alias=True),
    )
    writers: list[Writer] = [*factory.open_writers(run, config.log.writers, quiet=quiet)]
    sharded_over = world.size if strategy.is_sharded(state.forward) else None
    summary = model_summary(built.model, state.optimizer, sharded_over=sharded_over, blocks=built.blocks)
    warning = warm_up_warning(state.schedule, stop, config.schedule.warmup_share)
    for text in (*log_header, *summary, *built.told, *warning):
        for writer in writers:
            writer.message(text)
    return writers
