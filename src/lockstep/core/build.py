"""From a config and a task to objects: the model, the optimizer, the data, and a run that is ready to train.

`run_model` has the functions for the model and the optimizer, `run_data` those for the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.core import devices, task_checks
from lockstep.core.checkpoint import finite
from lockstep.core.checkpoint import state as checkpoint_state
from lockstep.core.checkpoint.form import Form, check_complete
from lockstep.core.checkpoint.store import Checkpoint
from lockstep.core.config.sections import RunConfig
from lockstep.core.data.data_check import check_data
from lockstep.core.data.loader import StepIterator
from lockstep.core.data.order import StepPlan
from lockstep.core.ema import Ema
from lockstep.core.loop import Intervals
from lockstep.core.optim import check_updates
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.world import World
from lockstep.core.run_data import agreed_fingerprint, grouping, make_loader, step_plan
from lockstep.core.run_model import BuiltModel, build_model, load_first_state, make_optimizer, seed_everything
from lockstep.core.schedule import Schedule
from lockstep.core.step import TrainState
from lockstep.core.stopping import Stopping
from lockstep.core.task import Task
from lockstep.core.train_metrics import TrainMetrics


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
    """Number of samples of the training data, and a digest; see `core.data.fingerprint`."""
    evaluated: dict[str, float]
    """Results of the evaluation at `state.step`, where the checkpoint has them; else empty."""
    parts: Mapping[str, Any]
    """The record of the training's Parts in the checkpoint. Empty without a checkpoint."""
    form: Form
    """The form of the newly built model's state, before a checkpoint was loaded."""
    may_be_infinite: finite.Grades
    """Tensors that are not finite at the start of the run: a checkpoint may hold them."""
    warnings: list[str]
    """Warnings that every start of the run shows at its beginning and at its end."""
    stopping: Stopping
    """Decides whether the training ends before `stop`."""

    @property
    def plan(self) -> StepPlan:
        """The cut of global batches into micro-batches, as it is now."""
        return self.batches.plan


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
    task_checks.signatures(task)
    seed_everything(config)
    data = task_checks.data(task.train_data(), "Task.train_data")
    remarks = [] if checkpoint else check_data(data, world)
    plan = step_plan(config, data, world, micro_batch)
    train = config.train
    stop = train.steps or max((train.epochs or 1) * plan.steps_per_epoch, train.min_steps or 0)
    fingerprint, warnings = agreed_fingerprint(data, world, in_worker=config.data.workers > 0)
    step = checkpoint.step if checkpoint else 0
    built = build_model(config, task, world, steps_per_epoch=plan.steps_per_epoch, step=step, init=checkpoint is None)
    built.messages += [*grouping(plan), *remarks]
    precision = Precision(config.precision, world.device, world.size)
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
        metrics=TrainMetrics(task, world) if config.log.train_metrics else None,
        averages=Ema(built.model, train.ema_decay) if train.ema_decay else None,
        unfreezing=built.unfreezing,
    )
    load_first_state(built, train, state.optimizer, precision)
    check_updates(state.optimizer)
    checkpoint_state.capture(built.model, state.optimizer)  # raises now, not at the end, if the state cannot be saved
    # Weights that `train.init_from` gave, or that train later, are the task's no more.
    check_complete(built.model, also_frozen=bool(train.init_from or train.unfreeze))
    loader = make_loader(config, data, task, world, training=True)
    batches = StepIterator(loader, plan, rank=world.rank, start=step, stop=stop)
    return PreparedRun(
        built=built,
        state=state,
        batches=batches,
        stop=stop,
        fingerprint=fingerprint,
        evaluated=checkpoint.metrics if checkpoint else {},
        parts=checkpoint.manifest.get("parts", {}) if checkpoint else {},
        form=Form.of(built.model),
        may_be_infinite={},
        warnings=list(dict.fromkeys([*(checkpoint.manifest["warnings"] if checkpoint else ()), *warnings])),
        stopping=Stopping(train.stop_when, train.max_time),
    )


def intervals(config: RunConfig, plan: StepPlan) -> Intervals:
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
