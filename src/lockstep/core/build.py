"""From a config and a task to a run that is ready to train.

`run_model` has the functions for the model and the optimizer, `run_data` those for the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.core import caller, devices, optimizer_class, task_checks
from lockstep.core.checkpoint import finite
from lockstep.core.checkpoint import state as checkpoint_state
from lockstep.core.checkpoint.form import Form, check_complete
from lockstep.core.checkpoint.store import Checkpoint
from lockstep.core.config.sections import RunConfig
from lockstep.core.data.data_check import check_data
from lockstep.core.data.loader import StepIterator
from lockstep.core.data.order import Order, StepPlan
from lockstep.core.ema import Ema
from lockstep.core.held_folder import HeldFolder
from lockstep.core.loop import Intervals
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.world import World
from lockstep.core.parallel.wrapped_model import is_compiled
from lockstep.core.run_data import EvaluationData, agreed_fingerprint, grouping, make_loader, step_plan
from lockstep.core.run_model import SpreadModel, build_model, make_optimizer, make_schedule, seed_everything
from lockstep.core.step import TrainState, Update, train_step
from lockstep.core.stopping import Stopping
from lockstep.core.task import Task
from lockstep.core.train_metrics import TrainMetrics
from lockstep.core.writer import Writer, tell


@dataclass
class Run:
    """A run on this rank: what is trained, on which data, until when, and where it is logged.

    `prepare_run` makes it, `resume.restore` loads a checkpoint into it, `training_run.steps` trains it. The Parts and
    the viewers of a training get the run. The run does not hold them: a cycle would be freed late, and with
    it the memory of the model and the workers of loaders.
    """

    config: RunConfig
    task: Task
    folder: Path
    """The run directory."""
    state: TrainState
    batches: StepIterator
    """This rank's micro-batches of each step, from `state.step` on."""
    stop: int
    """The step at which the training ends."""
    first_step: int
    """The steps that were done before this start."""
    intervals: Intervals
    """The steps after which the loop logs, evaluates and saves."""
    blocks: list[str]
    """Names of the model's repeated blocks."""
    fingerprint: dict[str, Any]
    """Number of samples of the training data, and a digest; see `core.data.fingerprint`."""
    results: dict[str, float]
    """Results of the evaluation at `first_step`, if the checkpoint has them; else empty."""
    saved_parts: Mapping[str, Any]
    """The record of the training's Parts in the checkpoint. Empty without a checkpoint."""
    saved_log: Mapping[str, Any]
    """What the checkpoint has of the steps before it, for the log; see `LogWindow.saved`."""
    form: Form
    """The form of the newly built model's state, before a checkpoint was loaded."""
    messages: list[str]
    """Lines for the beginning of the log."""
    warnings: list[str]
    """Warnings that every start of the run shows at the beginning and again at the end."""
    stopping: Stopping
    """Decides whether the training ends before `stop`."""
    update: Update
    """Consumes the global batches."""
    by_loop: bool = False
    """True if a user's own loop computes the losses, by code that calls the model itself; see `lockstep.Loop`. The
    task's `loss` is a stand-in then, for passes whose values do not count."""
    held: HeldFolder | None = None
    """The run directory, held open. None: nothing is kept."""
    id: str | None = None
    """Tells the run from all others. None: its checkpoints do not say whose they are."""
    may_be_infinite: finite.Grades = field(default_factory=dict)
    """Tensors that are not finite at the start of the run: a checkpoint may hold them."""
    moves_in_passes: list[str] = field(default_factory=list)
    """Parameters that the forward passes of the training write, as far as this process has seen."""
    checked_step: int | None = None
    """The last step whose state a check of the watch has seen that passed. None: there was none."""
    checks: int = 0
    """How many checks have passed, in all starts of the run."""
    evaluated: list[EvaluationData] = field(default_factory=list)
    """The sets of data that the training evaluates. Empty: it evaluates nothing."""
    writers: list[Writer] = field(default_factory=list)
    """Receive the log. Empty but on rank 0."""

    @property
    def plan(self) -> StepPlan:
        """The split of global batches into micro-batches, as it is now."""
        return self.batches.plan

    @property
    def model(self) -> nn.Module:
        """The model that the task made."""
        return self.state.strategy.unwrapped.model

    @property
    def is_compiled(self) -> bool:
        """True if `torch.compile` was applied to the model or to parts of it."""
        return self.config.compute.compile is not None or is_compiled(self.model)

    @property
    def world(self) -> World:
        """The ranks that train."""
        return self.state.world

    def tell(self, text: str) -> None:
        """Write lines for people into all logs."""
        tell(self.writers, caller.words(text, "Loop" if self.by_loop else "Trainer"))


class Beginning:
    """The weights with which a new training begins. This class leaves those that the task made."""

    def load_weights(self, model: nn.Module, world: World) -> list[str]:
        """Load weights into a model; a rank may hold only shards of it. Returns lines for the log."""
        return []

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision) -> list[str]:
        """Load a state of the optimizer and a loss scale, if there are any. Returns lines for the log."""
        return []


def prepare_run(
    config: RunConfig,
    task: Task,
    world: World,
    *,
    micro_batch: int,
    checkpoint: Checkpoint | None,
    folder: Path = Path(),
    beginning: Beginning | None = None,
    order_of: Callable[[RunConfig, Any], Order | None] = lambda config, data: None,
    by_loop: bool = False,
) -> Run:
    """Make everything that a run needs. `resume.restore` then loads `checkpoint` into the result.

    Args:
        micro_batch: largest number of samples in a forward pass.
        checkpoint: the checkpoint from which the run resumes. None: a new run.
        folder: the run directory.
        beginning: loads the weights with which a new run begins. None: they are the task's.
        order_of: returns what draws the samples of an epoch of the training data. None: an epoch has each sample once.
        by_loop: see `Run`.

    Raises:
        DataError: the training data cannot be used.
        TrainingError: the model cannot be trained.
        UsageError: the config does not fit the model, the data or the ranks.
    """
    task_checks.signatures(task)
    seed_everything(config)
    data = task_checks.data(task.train_data(), "Task.train_data")
    remarks = [] if checkpoint else check_data(data, world)
    order = order_of(config, data)
    plan = step_plan(config, data, world, micro_batch, order)
    stop = _last_step(config, plan)
    in_worker, start_method = config.data.workers > 0, config.data.start_method
    fingerprint, warnings = agreed_fingerprint(task, data, world, order, in_worker=in_worker, start_method=start_method)
    step = checkpoint.step if checkpoint else 0
    built = build_model(config, task, world, steps_per_epoch=plan.steps_per_epoch, step=step, is_bypassed=by_loop)
    beginning = beginning if beginning is not None and checkpoint is None else Beginning()
    loader = make_loader(config, data, task, world, training=True)
    notes = [*grouping(plan), *loader.micro_batches.seeding.notes(), *remarks]
    state = _state_with(beginning, config, task, world, built, plan, stop, notes=notes)
    return Run(
        config=config,
        task=task,
        folder=folder,
        state=state,
        batches=StepIterator(loader, plan, ranks=world.data_ranks, start=step, stop=stop),
        stop=stop,
        first_step=step,
        intervals=_intervals(config, plan),
        blocks=built.blocks,
        fingerprint=fingerprint,
        results=checkpoint.metrics if checkpoint else {},
        saved_parts=checkpoint.manifest.get("parts", {}) if checkpoint else {},
        saved_log=checkpoint.manifest.get("log", {}) if checkpoint else {},
        form=Form.of(built.strategy.unwrapped.model),
        messages=built.messages,
        warnings=list(dict.fromkeys([*(checkpoint.manifest["warnings"] if checkpoint else ()), *warnings])),
        stopping=Stopping(config.train.stop_when, config.train.max_time),
        update=train_step,
        by_loop=by_loop,
    )


def _last_step(config: RunConfig, plan: StepPlan) -> int:
    """The step at which the training ends."""
    train = config.train
    return train.steps or max((train.epochs or 1) * plan.steps_per_epoch, train.min_steps or 0)


def _state_with(
    beginning: Beginning,
    config: RunConfig,
    task: Task,
    world: World,
    built: SpreadModel,
    plan: StepPlan,
    stop: int,
    *,
    notes: list[str],
) -> TrainState:
    """The state of a training, with the weights and the state of `beginning`. Adds lines to the model's messages."""
    model = built.strategy.unwrapped.model
    built.messages.extend([*beginning.load_weights(model, world), *notes])
    state = train_state(config, task, world, built, steps_per_epoch=plan.steps_per_epoch, stop=stop)
    built.messages.extend(beginning.load_state(model, state.optimizer, state.precision))
    _check_saved(config, state)
    return state


def train_state(
    config: RunConfig, task: Task, world: World, built: SpreadModel, *, steps_per_epoch: int, stop: int
) -> TrainState:
    """The state of a training that begins, with its optimizer and schedule."""
    strategy, model = built.strategy, built.strategy.unwrapped.model
    precision = Precision(config.precision, world.device, world.data_size)
    return TrainState(
        strategy=strategy,
        world=world,
        optimizer=make_optimizer(
            config,
            task,
            model,
            built.blocks,
            sharded=strategy.is_sharded,
            fuses_adam=_fuses_adam(config, world),
        ),
        precision=precision,
        schedule=make_schedule(
            config.schedule, total=stop, steps_per_epoch=steps_per_epoch, of_task=task_checks.schedule(task)
        ),
        seed=config.seed,
        clip_norm=config.optim.clip_norm,
        coefficients=task_checks.coefficients(task),
        must_agree_on_weights=config.data.on_error == "skip",
        metrics=TrainMetrics(task, world) if config.log.train_metrics else None,
        averages=Ema(model, config.train.ema_decay) if config.train.ema_decay else None,
        unfreezing=built.unfreezing,
    )


def _fuses_adam(config: RunConfig, world: World) -> bool:
    """Whether Adam and AdamW use their fused kernel, if the config leaves the choice."""
    device, parallel = devices.of(world.device), config.parallel
    if not device.has_fused_adam or world.tensor > 1 or parallel.cpu_offload:
        return False
    if config.precision == "fp16":  # it counts a skipped update by itself, after hooks have seen the update
        return False
    # On a CPU, it rounds the elements after the last full vector differently, and a shard has more such elements. With
    # virtual ranks, FSDP has the bits of DDP.
    return parallel.virtual_ranks is None and (device.has_own_memory or parallel.strategy != "fsdp")


def _check_saved(config: RunConfig, state: TrainState) -> None:
    """Seed the updates of the optimizer, and check that checkpoints can have all of the state."""
    model, optimizer = state.strategy.unwrapped.model, state.optimizer
    optimizer_class.note_settings(optimizer)
    optimizer_class.seed_updates(optimizer, config.seed, lambda: state.step, state.world.device)
    checkpoint_state.capture(model, optimizer)  # raises now, not at the end, if the state cannot be saved
    # Weights that `train.init_from` gave, or that train later, are the task's no more.
    check_complete(model, also_frozen=bool(config.train.init_from or config.train.unfreeze))


def _intervals(config: RunConfig, plan: StepPlan) -> Intervals:
    """The steps after which the loop logs, evaluates and saves."""
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
    )
