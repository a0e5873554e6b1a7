"""From a config and a task to a model that is ready to run on these ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lockstep.checkpoint import files
from lockstep.checkpoint import state as states
from lockstep.checkpoint.export import load_weights
from lockstep.checkpoint.store import Checkpoint
from lockstep.config import ParallelConfig, RunConfig
from lockstep.distributed.strategy import DDPOptions, Forward, FSDPOptions, Strategy, make_strategy
from lockstep.distributed.world import World
from lockstep.engine import task_checks
from lockstep.engine.blocks import compile_modules, find_blocks, recompute_activations
from lockstep.engine.optim import Group, build_optimizer
from lockstep.engine.schedule import scaled_lr
from lockstep.engine.unfreeze import Stage, Unfreezing
from lockstep.errors import TrainingError, UsageError
from lockstep.tasks.task import Task

# Found by training with every class of torch.optim (tests/distributed/test_sharding.py). Muon would train another model without a word.
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
) -> tuple[BuiltModel, Strategy]:
    """The task's model with its initial weights, or with those of `train.init_from`; and the strategy that spreads it over the ranks.

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
    strategy = make_strategy(
        parallel.strategy, world, trains=training, ddp=_ddp_options(parallel), fsdp=_fsdp_options(parallel)
    )
    seed(config)
    model, told = strategy.build_model(lambda: _check_parameters(task_checks.model(task)))
    if compute.channels_last and not strategy.is_sharded:
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
    strategy.wrap(Forward(model, task.loss), list(blocks.values()))
    if init and config.train.init_from:
        load_weights(model, Path(config.train.init_from), config.train.init_skip)
    return BuiltModel(model, list(blocks), unfreezing, told), strategy


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


def _ddp_options(parallel: ParallelConfig) -> DDPOptions:
    return DDPOptions(
        find_unused_parameters=parallel.find_unused_parameters,
        static_graph=parallel.static_graph,
        bucket_mb=parallel.bucket_mb,
        gradient_as_bucket_view=parallel.gradient_as_bucket_view,
    )


def _fsdp_options(parallel: ParallelConfig) -> FSDPOptions:
    return FSDPOptions(
        reshard_after_forward=parallel.reshard_after_forward,
        shard_ranks=parallel.shard_ranks,
        cpu_offload=parallel.cpu_offload,
        forward_prefetch=parallel.forward_prefetch,
        backward_prefetch=parallel.backward_prefetch,
        param_dtype=parallel.param_dtype,
        reduce_dtype=parallel.reduce_dtype,
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
