"""From a config and a task to objects: the model, the optimizer, the data, and a run that is ready to train."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lockstep import config_file, devices, run_directory
from lockstep.checkpoint import choice, finite
from lockstep.checkpoint import state as checkpoint_state
from lockstep.checkpoint.export import load_weights
from lockstep.checkpoint.store import Checkpoint
from lockstep.config import ParallelConfig, RunConfig, TrainConfig, training_keys
from lockstep.data.fingerprint import fingerprint
from lockstep.data.loader import Loader, MicroBatches, StepIterator
from lockstep.data.order import EvaluationPlan, StepPlan
from lockstep.distributed.factory import make_strategy
from lockstep.distributed.precision import Precision
from lockstep.distributed.strategy import DDPOptions, Forward, FSDPOptions, Strategy
from lockstep.distributed.world import World
from lockstep.engine import batch_norm, task_checks
from lockstep.engine.blocks import compile_modules, find_blocks, recompute_activations
from lockstep.engine.data_check import check_data
from lockstep.engine.ema import Ema
from lockstep.engine.flops import FlopCount
from lockstep.engine.loop import Intervals
from lockstep.engine.optim import Group, build_optimizer
from lockstep.engine.out_of_memory import Guard
from lockstep.engine.schedule import Schedule, scaled_lr
from lockstep.engine.step import TrainState
from lockstep.engine.stopping import Stopping, StopRule
from lockstep.engine.unfreeze import Stage, Unfreezing
from lockstep.errors import DataError, TrainingError, UsageError
from lockstep.observe import factory
from lockstep.observe.model_summary import idle_ranks_warning, model_summary, warm_up_warning
from lockstep.observe.writer import RunInfo, Writer
from lockstep.tasks.task import Task

# Found by training with every class of torch.optim (tests/distributed/test_sharding.py). Muon would silently train
# another model.
_NEED_WHOLE_MATRICES = ("Muon", "Adafactor", "Rprop")
_NO_SHARDED_KERNEL = ("SGD", "Adagrad")


@dataclass
class BuiltModel:
    """A model on this rank."""

    model: nn.Module
    """The model that the task made."""
    strategy: Strategy
    """How the model is spread over ranks; it holds the module that runs it."""
    blocks: list[str]
    """Names of the model's repeated blocks."""
    unfreezing: Unfreezing | None
    messages: list[str]
    """Lines about the model for the log."""


@dataclass
class EvaluationData:
    """The samples of an evaluation, and how they are read."""

    data: Dataset[Any]
    loader: Loader
    plan: EvaluationPlan


@dataclass
class PreparedRun:
    """A run on this rank that is ready to begin, or to go on from a checkpoint."""

    built: BuiltModel
    state: TrainState
    batches: StepIterator
    """This rank's micro-batches of each step, from `state.step` on."""
    stop: int
    """The step at which the training ends."""
    fingerprint: dict[str, Any]
    """Number of samples of the training data, and a digest; see `data.fingerprint`."""
    evaluated: dict[str, float]
    """Results of the evaluation at `state.step`, where the checkpoint has them; else empty."""
    may_be_infinite: finite.Grades
    """Tensors that are not finite at the start of the run: a checkpoint may hold them."""
    warnings: list[str]
    """Warnings that every start of the run shows at its beginning and at its end."""
    stopping: Stopping
    """Decides whether the training ends before `stop`."""

    @property
    def plan(self) -> StepPlan:
        """How the global batches are cut into micro-batches now."""
        return self.batches.plan


def seed_everything(config: RunConfig) -> None:
    """Seed torch, NumPy and Python, so that a task draws the same data and the same model in every process."""
    torch.manual_seed(config.seed)
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)


def prepare_run(
    config: RunConfig,
    task: Task,
    world: World,
    *,
    micro_batch: int,
    checkpoint: Checkpoint | None,
) -> PreparedRun:
    """Make everything that a run needs. `resume.restore` then loads `checkpoint` into the result.

    Args:
        micro_batch: largest number of samples in a forward pass.
        checkpoint: the checkpoint from which the run goes on. None: a new run.

    Raises:
        DataError: the training data cannot be used.
        TrainingError: the model cannot be trained.
        UsageError: the config does not fit the model, the data or the ranks.
    """
    seed_everything(config)
    data = task_checks.data(task.train_data(), "Task.train_data")
    remarks = [] if checkpoint else check_data(data, world)
    plan = step_plan(config, data, world, micro_batch)
    train = config.train
    stop = train.steps or max((train.epochs or 1) * plan.steps_per_epoch, train.min_steps or 0)
    data_fingerprint = _fingerprint(data, world, in_worker=config.data.workers > 0)
    step = checkpoint.step if checkpoint else 0
    built = build_model(config, task, world, steps_per_epoch=plan.steps_per_epoch, step=step, init=checkpoint is None)
    built.messages += [*_grouping(plan), *remarks]
    precision = Precision(config.precision, world.device, world.data_size)
    state = TrainState(
        strategy=built.strategy,
        optimizer=make_optimizer(
            config,
            built.model,
            built.blocks,
            sharded=built.strategy.is_sharded,
            fuses_adam=devices.of(world.device).has_fused_adam
            and not config.parallel.cpu_offload
            and config.precision != "fp16",  # it counts a skipped update by itself, after hooks have seen the update
        ),
        precision=precision,
        schedule=Schedule(total=stop, steps_per_epoch=plan.steps_per_epoch, **config.schedule.model_dump()),
        seed=config.seed,
        clip_norm=config.optim.clip_norm,
        coefficients=task_checks.coefficients(task),
        must_agree_on_weights=config.data.on_error == "skip",
        flops=_flop_count(config, built, precision),
        averages=Ema(built.model, train.ema_decay) if train.ema_decay else None,
        unfreezing=built.unfreezing,
        guard=Guard(built.strategy, precision, config.compute.halve_on_oom and devices.of(world.device).has_own_memory),
    )
    checkpoint_state.capture(
        built.model, state.optimizer
    )  # where the state cannot be saved, this raises now, and not at the end
    loader = make_loader(config, data, task, world, training=True)
    batches = StepIterator(loader, plan, rank=world.data_rank, start=step, stop=stop)
    return PreparedRun(
        built=built,
        state=state,
        batches=batches,
        stop=stop,
        fingerprint=data_fingerprint,
        evaluated=checkpoint.metrics if checkpoint else {},
        may_be_infinite={},
        warnings=list(checkpoint.manifest.get("warnings", ())) if checkpoint else [],
        stopping=_stopping(train),
    )


def _fingerprint(data: Dataset[Any], world: World, *, in_worker: bool) -> dict[str, Any]:
    """The fingerprint of the training data. With several nodes, each node reads its own.

    Raises:
        UsageError: the nodes have different data.
    """
    readers = world.nodes.first_ranks if world.size > 1 else [0]
    own = fingerprint(data, in_worker) if world.rank in readers else None
    gathered = world.gather(own) if len(readers) > 1 else [own]

    def same() -> dict[str, Any]:
        assert gathered is not None  # on rank 0
        first: dict[str, Any] = gathered[0] or {}
        others = {rank: gathered[rank] or {} for rank in readers if gathered[rank] != first}
        if others:
            names = world.nodes.names
            counts = {names[rank]: found["samples"] for rank, found in others.items()}
            differ = [f"{count} samples on node {name}" for name, count in counts.items() if count != first["samples"]]
            what = "; ".join(differ) or f"other samples on node {', '.join(counts)}"
            raise UsageError(
                f"the nodes have different training data: {first['samples']} samples on node {names[0]}, {what}",
                where="data.train",
                remedy="give all nodes the same data under this path, or put the data on a shared disk",
            )
        return first

    return world.on_rank0(same)


def _flop_count(config: RunConfig, built: BuiltModel, precision: Precision) -> FlopCount | None:
    compiled = config.compute.compile is not None
    return FlopCount(built.strategy, precision, compiled=compiled) if config.log.flops else None


def _stopping(train: TrainConfig) -> Stopping:
    rule = StopRule(**train.stop_when.model_dump()) if train.stop_when else None
    return Stopping(rule, train.max_time)


# ---- the model and the optimizer


def build_model(
    config: RunConfig,
    task: Task,
    world: World,
    *,
    steps_per_epoch: int | None = None,
    step: int = 0,
    init: bool = False,
) -> BuiltModel:
    """The task's model, with the weights that the task gave it or with the weights of `train.init_from`.

    Args:
        steps_per_epoch: steps of an epoch, where the model will be trained. None: the model only runs forward.
        step: step at which training begins or goes on.
        init: whether to load `train.init_from`.

    Raises:
        TrainingError: the model has no trainable parameters, or parameters that cannot be trained.
        UsageError: the config does not fit the model or the ranks.
    """
    parallel, compute = config.parallel, config.compute
    training = steps_per_epoch is not None
    strategy = make_strategy(
        parallel.strategy, world, trains=training, ddp=_ddp_options(parallel), fsdp=_fsdp_options(parallel)
    )
    seed_everything(config)
    notes: list[str] = []

    def make() -> nn.Module:
        made, notes[:] = batch_norm.without_unsupported(_check_parameters(task_checks.model(task)), world)
        return made

    model, messages = strategy.build_model(make)
    messages += notes
    if compute.channels_last and not strategy.is_sharded:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.zero_grad(set_to_none=True)  # the first step would add to gradients that a task has left
    blocks = find_blocks(model, parallel.shard_modules)
    unfreezing = None
    if steps_per_epoch is not None:
        unfreezing = _unfreezing(config, task, model, steps_per_epoch=steps_per_epoch, step=step)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            remedy = "set requires_grad_(True) on some parameters, or unfreeze fewer of them later"
            raise TrainingError("the model has no trainable parameter", where="Task.model", remedy=remedy)
    if training and compute.activation_checkpointing:
        recompute_activations(list(blocks.values()), world.device)
    if compute.compile is not None:
        compile_modules(
            model,
            list(blocks.values()),
            what=compute.compile,
            backend=compute.compile_backend,
            mode=compute.compile_mode,
            dynamic=compute.compile_dynamic,
        )
    forward = Forward(model, task.loss, calls_vary=task.calls_vary, uses_graphs=compute.uses_cuda_graphs)
    strategy.wrap(forward, list(blocks.values()))
    messages = list(messages)
    if init and config.train.init_from:
        messages += _load_first_weights(model, config.train, world)
    return BuiltModel(model=model, strategy=strategy, blocks=list(blocks), unfreezing=unfreezing, messages=messages)


def _load_first_weights(model: nn.Module, train: TrainConfig, world: World) -> list[str]:
    """Load the weights of `train.init_from` into `model`. Returns lines that say which checkpoint of a run this is."""
    source = Path(train.init_from or "").expanduser()
    folder = source / "checkpoints"
    if not folder.is_dir():
        if train.init_checkpoint is not None:
            raise UsageError(
                f"{source} is not the directory of a run",
                where="train.init_checkpoint",
                remedy="leave it out, or let train.init_from name a run directory",
            )
        load_weights(model, source, train.init_skip)
        return []
    retention = run_directory.retention(config_file.read_run(source))
    checkpoint, lines = choice.choose(folder, world, retention, train.init_checkpoint, where="train.init_checkpoint")
    load_weights(model, source, train.init_skip, checkpoint)
    return [f"train.init_from={train.init_from}: {line}" for line in lines]


def _check_parameters(model: nn.Module) -> nn.Module:
    """Check that all parameters of `model` have shapes and dense gradients. Returns `model`.

    Raises:
        TrainingError: some module is lazy or has sparse gradients; names the modules and the remedy.
    """
    lazy = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if nn.parameter.is_lazy(value)]
    if lazy:
        raise TrainingError(
            f"the model is not complete: {', '.join(lazy[:5])} get a shape only when a batch passes through",
            where="Task.model",
            remedy="give lazy modules (LazyLinear, ...) their sizes, or pass a batch through the model",
        )
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    sparse = [
        name or "the model"
        for name, embedding in embeddings.items()
        if embedding.sparse and embedding.weight.requires_grad
    ]
    if sparse:
        raise TrainingError(
            f"{', '.join(sparse[:5])} would have sparse gradients: most optimizers and clipping cannot use them",
            where="Task.model",
            remedy="make the embedding with sparse=False: it learns the same",
        )
    return model


def _unfreezing(
    config: RunConfig, task: Task, model: nn.Module, *, steps_per_epoch: int, step: int
) -> Unfreezing | None:
    """The phases of `train.unfreeze`, applied to the model. None: all parameters stay as the model made them.

    Raises:
        UsageError: a pattern matches no parameter, or a parameter trains that the task needs frozen.
    """
    stages = [
        Stage(stage.step or math.ceil((stage.epoch or 0) * steps_per_epoch), stage.match)
        for stage in config.train.unfreeze
    ]
    unfreezing = Unfreezing(model, stages)
    unfreezing.check_frozen({pattern: epochs * steps_per_epoch for pattern, epochs in task.frozen_epochs.items()})
    if not stages:
        return None
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


def make_optimizer(
    config: RunConfig,
    model: nn.Module,
    blocks: Sequence[str] = (),
    *,
    sharded: bool = False,
    fuses_adam: bool = False,
) -> torch.optim.Optimizer:
    """The config's optimizer, with learning rates scaled by the global batch.

    Args:
        blocks: names of the model's repeated blocks, in the model's order.
        sharded: whether each rank holds only shards of the parameters.
        fuses_adam: whether Adam and AdamW use their fused kernel, where `optim.fused` is None.

    Raises:
        UsageError: the optimizer cannot train shards: it needs whole matrices, or torch has no kernel for shards.
    """
    optim = config.optim
    fused = bool(optim.fused if optim.fused is not None else optim.args.get("fused"))
    if sharded:
        check_shardable(optim.name, fused=fused)
    scale = scaled_lr(
        1.0, optim.lr_scaling, global_batch=config.batch.global_ or 1, reference_batch=optim.reference_batch
    )
    groups = [
        Group(group.name, group.match, lr=group.lr * scale if group.lr else None, weight_decay=group.weight_decay)
        for group in optim.groups
    ]
    return build_optimizer(
        model,
        optim.name,
        optim.lr * scale,
        weight_decay=optim.weight_decay,
        groups=groups,
        args=optim.args,
        fused=optim.fused,
        fuses_adam=fuses_adam,
        layer_decay=optim.layer_decay,
        blocks=blocks,
    )


def check_shardable(optimizer: str, *, fused: bool) -> None:
    """Check that an optimizer can train shards.

    Raises:
        UsageError: it needs whole matrices, or torch has no kernel for shards.
    """
    if optimizer in _NEED_WHOLE_MATRICES or (fused and optimizer in _NO_SHARDED_KERNEL):
        remedy = "use AdamW, SGD or another optimizer that updates each element by itself, or parallel.strategy=ddp"
        what = f"{'fused ' if optimizer in _NO_SHARDED_KERNEL else ''}{optimizer} cannot train sharded parameters"
        raise UsageError(what, where="optim.name", remedy=remedy)


# ---- the data


def asked_micro_batches(config: RunConfig, world: World) -> list[list[int]]:
    """The sizes of micro-batches that the config asks for: pairs of an epoch and the size in samples from it on."""
    batch = config.batch
    global_batch = batch.global_ or 1
    by_epoch = batch.micro if isinstance(batch.micro, dict) else {0: batch.micro or global_batch}
    whole = -(-global_batch // world.data_size)
    return [[epoch, min(size, whole)] for epoch, size in sorted(by_epoch.items())]


def step_plan(config: RunConfig, data: Dataset[Any], world: World, micro_batch: int) -> StepPlan:
    """Which samples every step takes.

    Args:
        micro_batch: largest number of samples in a forward pass, also where the config asks for more.

    Raises:
        DataError: the data set is empty, or smaller than the only batch of an epoch, or its lengths are not numbers.
        UsageError: samples are to be grouped by length, and their lengths are not known.
    """
    length = len(data)  # type: ignore[arg-type]
    if length == 0:
        raise DataError("the training data set is empty", where="Task.train_data", remedy="check data.train")
    global_batch = config.batch.global_ or 1
    if config.data.drop_last and length < global_batch:
        remedy = "lower batch.global, or set data.drop_last=false"
        raise DataError(
            f"{length} samples do not fill one batch of {global_batch}", where="data.drop_last", remedy=remedy
        )
    lengths = _sample_lengths(data, "Task.train_data")
    if config.data.group_by_length and lengths is None:
        raise UsageError(
            "the lengths of the samples are not known",
            where="data.group_by_length",
            remedy="leave it out, or let Task.train_data return a data set with the attribute `lengths`: "
            "an array of the length of each sample",
        )
    return StepPlan(
        length,
        global_batch,
        micro_batch,
        world.data_size,
        config.seed,
        config.data.drop_last,
        lengths,
        config.batch.micro if isinstance(config.batch.micro, dict) else None,
        config.data.group_by_length,
    )


def _grouping(plan: StepPlan) -> list[str]:
    """Lines for the log where lengths choose the samples of a batch."""
    count, batches = plan.group_by_length, plan.length // plan.global_batch
    if not count:
        return []
    lines = [f"data.group_by_length={count}: windows of {count} batches are sorted by the length of their samples"]
    if count >= batches:
        lines.append(
            f"  a window holds the whole epoch ({batches} batches), so every epoch has almost the same batches; "
            f"data.group_by_length={max(1, batches // 4)} makes four windows"
        )
    return lines


def make_loader(config: RunConfig, data: Dataset[Any], task: Task, world: World, *, training: bool) -> Loader:
    """The loader of this rank's micro-batches of `data`."""
    micro_batches = MicroBatches(data, task, config.seed, training=training, on_error=config.data.on_error)
    return Loader(micro_batches, config.data.workers, world.device, channels_last=config.compute.channels_last)


def evaluation_data(config: RunConfig, task: Task, world: World, data: Dataset[Any] | None = None) -> EvaluationData:
    """`data`, by default the task's evaluation data, ready to be read: cut alike for every world size.

    Raises:
        DataError: the task has no evaluation data, or an empty data set.
    """
    if data is None:
        data = required_evaluation_data(task)
    else:
        data = task_checks.data(data, "the data to predict")
    micro_batch = config.batch.smallest_micro or min(config.batch.global_ or 32, 256)
    plan = EvaluationPlan(len(data), micro_batch, _sample_lengths(data, "the evaluation data"))  # type: ignore[arg-type]
    return EvaluationData(data, make_loader(config, data, task, world, training=False), plan)


class NoEvaluationData(DataError):
    """A task has no evaluation data."""


def required_evaluation_data(task: Task) -> Dataset[Any]:
    """The task's evaluation data.

    Raises:
        NoEvaluationData: the task has none.
        DataError: the data set is empty.
    """
    evaluation_data = task.eval_data()
    if evaluation_data is None:
        remedy = "set data.eval, or let Task.eval_data return a data set; train.eval_every_epochs=0 trains without it"
        raise NoEvaluationData("there is no evaluation data", where="Task.eval_data", remedy=remedy)
    data = task_checks.data(evaluation_data, "Task.eval_data")
    if len(data) == 0:  # type: ignore[arg-type]
        raise DataError("the evaluation data set is empty", where="Task.eval_data", remedy="check data.eval")
    return data


def _sample_lengths(data: Dataset[Any], where: str) -> Any:
    """Lengths of the samples, where the data set has the attribute `lengths`.

    Raises:
        DataError: the attribute is not an array of one number for each sample.
    """
    lengths = getattr(data, "lengths", None)
    if lengths is None:
        return None
    found, expected = np.asarray(lengths), (len(data),)  # type: ignore[arg-type]
    if found.shape != expected or found.dtype.kind not in "iuf":
        raise DataError(
            f"`lengths` of the data set has the shape {found.shape} and the type {found.dtype}; expected: one number "
            f"for each of {len(data)} samples",  # type: ignore[arg-type]
            where=where,
            remedy="correct `lengths`, or give the attribute another name",
        )
    return found


def intervals(config: RunConfig, plan: StepPlan) -> Intervals:
    """How often the loop logs, evaluates and saves."""
    train, checkpoint = config.train, config.checkpoint
    evaluate = train.eval_every_steps
    if evaluate is None:
        evaluate = plan.steps_per_epoch * (train.eval_every_epochs or 0)
    return Intervals(
        log=config.log.every_steps,
        evaluate=evaluate,
        save=checkpoint.every_steps or 2**62,
        save_s=60 * (checkpoint.every_minutes or 0),
        save_evaluated=checkpoint.keep_best is not None,
        epoch_lines=train.steps is None and plan.steps_per_epoch >= config.log.every_steps,
    )


# ---- the log


def open_writers(
    config: RunConfig,
    folder: Path,
    state: TrainState,
    *,
    stop: int,
    built: BuiltModel,
    log_header: Sequence[str],
    git: Mapping[str, Any] | None,
    quiet: bool,
) -> list[Writer]:
    """The writers of a training, after they were given the lines on the data, the model and the schedule.

    Args:
        folder: the run directory.
        stop: step at which the training ends.
        log_header: lines of the task on its data.
        git: the git commit of the task's code, and whether files differ from it.
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
        hyperparameters=training_keys(config),
        git=git,
    )
    writers: list[Writer] = [*factory.open_writers(run, config.log.writers, quiet=quiet)]
    sharded_over = world.size if state.strategy.is_sharded else None
    summary = model_summary(built.model, state.optimizer, sharded_over=sharded_over, blocks=built.blocks)
    warning = warm_up_warning(state.schedule, stop, config.schedule.warmup_share)
    warning += idle_ranks_warning(config.batch.global_ or 1, world.data_size)
    for text in (*log_header, *summary, *built.messages, *warning):
        for writer in writers:
            writer.message(text)
    return writers
