"""The composition root: from a RunConfig to objects, and from objects to a training, an evaluation, a prediction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from lockstep import config_file, rundir
from lockstep.checkpoint import state as states
from lockstep.checkpoint import store
from lockstep.config import RunConfig
from lockstep.data.loader import Chunks, Loader, training_steps
from lockstep.data.order import StepPlan
from lockstep.dist import strategy
from lockstep.dist.precision import Precision
from lockstep.dist.world import World, join_world
from lockstep.engine import evaluate as evaluation
from lockstep.engine import trainer
from lockstep.engine.optim import Group, build_optimizer
from lockstep.engine.schedule import Schedule, scaled_lr
from lockstep.engine.step import Training
from lockstep.errors import CheckpointError, DataError, TrainingError
from lockstep.tasks import registry
from lockstep.tasks.task import Task


class Trainer:
    """Trains, evaluates and predicts as a config says, on the ranks that the environment describes (torchrun's variables).

    Args:
        config: a `RunConfig`, a mapping with the same keys, or what the command line takes: a recipe, FILE.yaml, FILE.py:Task.
        run_dir: where everything is written; default `runs/<name>`.
        fresh: delete what an earlier run left there instead of resuming it.
        quiet: print nothing.
    """

    def __init__(self, config: RunConfig | Mapping[str, Any] | str, *, run_dir: str | Path | None = None, fresh: bool = False, quiet: bool = False) -> None:
        if isinstance(config, str):
            config = config_file.load(config)
        elif not isinstance(config, RunConfig):
            config = config_file.parse(config, needs_task=False)
        self.config = config
        self.run_dir = Path(run_dir) if run_dir is not None else Path("runs") / config.name
        self.fresh, self.quiet = fresh, quiet

    def fit(self, task: Task | None = None) -> dict[str, float]:
        """Train to the end, resuming what the run directory holds.

        Args:
            task: instead of the config's.

        Returns:
            the last value of everything logged, such as `train/loss` and `eval/accuracy`.
        """
        with self._join() as world:
            self.config = rundir.claim(self.run_dir, self.config, world, self.fresh)
            task = task or self._task()
            model, run, plan, batches, stop = self._training(task, world)
            cadence = self._cadence(plan)
            evaluate = self._evaluator(task, model, run.precision, world, run.forward) if cadence.evaluate else dict
            watchers = [] if world.rank else rundir.watchers(self.run_dir, self.config, run, stop, model, quiet=self.quiet)
            try:
                latest = trainer.fit(run, batches, plan, stop, cadence, watchers, evaluate, self._saver(run, model))
                if not latest:  # resumed at the end
                    for watcher in watchers:
                        watcher.message(f"{self.run_dir} is complete at step {run.step}: raise train.epochs to go on, or start anew with --fresh")
                    latest = {f"eval/{name}": value for name, value in evaluate().items()}
            finally:
                for watcher in watchers:
                    watcher.close()
            return latest

    def evaluate(self, task: Task | None = None) -> dict[str, float]:
        """Loss and metrics of the newest checkpoint on the task's evaluation data, as in `engine.evaluate.evaluate`."""
        with self._join() as world:
            task = task or self._task()
            model = self._trained(task, world)
            results: dict[str, float] = self._evaluator(task, model, Precision(self.config.precision, world.device), world)()
            return results

    def predict(self, task: Task | None = None, data: Dataset[Any] | None = None) -> list[Any] | None:
        """The task's outputs for every sample of `data` (default: its evaluation data), in order; on rank 0, None elsewhere."""
        with self._join() as world:
            task = task or self._task()
            model = self._trained(task, world)
            data = data if data is not None else _required(task)
            loader = self._loader(data, task, world, training=False)
            precision = Precision(self.config.precision, world.device)
            return evaluation.predict(task, model, loader, _length(data), self._eval_micro(), world, precision)

    def describe(self, inputs: Sequence[str] = (), samples: int = 8, task: Task | None = None) -> list[dict[str, Any]]:
        """Predictions for people: of the files `inputs`, or of the first `samples` evaluation samples beside their truth."""
        task = task or self._task()
        data = task.input_data(inputs) if inputs else _required(task)
        count = len(inputs) or min(samples, _length(data))
        outputs = self.predict(task, Subset(data, range(count)))
        heads: list[dict[str, Any]] = [{"input": name} for name in inputs] or [{"sample": number, "truth": task.truth(data[number])} for number in range(count)]
        return [head | task.describe(output) for head, output in zip(heads, outputs or [], strict=True)]

    # ---- the objects

    def _task(self) -> Task:
        return registry.build_task(self.config.task, self.config.data.train, self.config.data.eval)

    def _join(self) -> contextlib.AbstractContextManager[World]:
        return join_world(self.config.device, self.config.parallel.timeout_s)

    def _training(self, task: Task, world: World) -> tuple[nn.Module, Training, StepPlan, Iterator[Any], int]:
        """Everything that `trainer.fit` needs, with the newest checkpoint loaded."""
        config = self.config
        data = task.train_data()
        length = _length(data)
        if length == 0:
            raise DataError("the training data set is empty", where="Task.train_data", remedy="check data.train")
        global_batch = config.batch.global_ or 1
        micro = min(config.batch.micro or global_batch, -(-global_batch // world.size))
        if config.data.drop_last and length < global_batch:
            remedy = "lower batch.global, or set data.drop_last=false"
            raise DataError(f"{length} samples do not fill one batch of {global_batch}", where="data.drop_last", remedy=remedy)
        plan = StepPlan(length, global_batch, micro, world.size, config.seed, config.data.drop_last, _lengths(data))
        stop = config.train.steps or (config.train.epochs or 1) * plan.steps_per_epoch
        torch.manual_seed(config.seed)
        model = task.model().to(world.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise TrainingError("the model has no trainable parameter", where="Task.model", remedy="set requires_grad_(True) on some")
        rate = config.optim
        scale = scaled_lr(1.0, rate.lr_scaling, global_batch, rate.reference_batch)
        groups = [Group(g.name, g.match, g.lr * scale if g.lr else None, g.weight_decay) for g in rate.groups]
        optimizer = build_optimizer(model, rate.name, rate.lr * scale, rate.weight_decay, groups, rate.args)
        shape = config.schedule.model_dump()
        run = Training(
            forward=strategy.wrap(strategy.Forward(model, task.loss), config.parallel.strategy, world, config.parallel.find_unused_parameters),
            optimizer=optimizer,
            precision=Precision(config.precision, world.device),
            schedule=Schedule(total=stop, steps_per_epoch=plan.steps_per_epoch, **shape),
            world=world,
            seed=config.seed,
            clip_norm=rate.clip_norm,
            coefficients=task.coefficients(),
            must_agree_on_weights=config.data.on_error == "skip",
            check_unused=not config.parallel.find_unused_parameters,
        )
        self._resume(run, model, world)
        batches = training_steps(self._loader(data, task, world, training=True), plan, world.rank, run.step, stop)
        return model, run, plan, batches, stop

    def _resume(self, run: Training, model: nn.Module, world: World) -> None:
        found = store.newest(self._checkpoints)
        if found is None:
            return
        state, manifest, complaints = found
        states.restore(state, model, run.optimizer)
        run.precision.scaler.load_state_dict(state["scaler"])
        run.step, run.skipped = manifest["step"], manifest["skipped"]
        if world.rank == 0 and not self.quiet:
            print("\n".join([*complaints, f"resuming {self.run_dir} at step {run.step}"]))

    def _trained(self, task: Task, world: World) -> nn.Module:
        """The model with the newest checkpoint's weights."""
        torch.manual_seed(self.config.seed)
        model = task.model().to(world.device)
        found = store.newest(self._checkpoints)
        if found is None:
            raise CheckpointError("no checkpoint", where=str(self._checkpoints), remedy="train first, or give the run's own directory")
        states.restore(found[0], model)
        return model

    def _saver(self, run: Training, model: nn.Module) -> Any:
        def save(latest: Mapping[str, float]) -> None:
            strategy.sync_buffers(run.forward, run.world)
            fault: Exception | None = None
            if run.world.rank == 0:
                state = states.capture(model, run.optimizer) | {"scaler": run.precision.scaler.state_dict()}
                about = {"skipped": run.skipped, "metrics": {k: v for k, v in latest.items() if k.startswith("eval/")}}
                try:
                    store.write(self._checkpoints, run.step, state, about, self.config.checkpoint.keep_last)
                except CheckpointError as error:
                    fault = error
            fault = run.world.broadcast(fault)
            if fault is not None:
                raise fault

        return save

    def _evaluator(self, task: Task, model: nn.Module, precision: Precision, world: World, forward: nn.Module | None = None) -> Any:
        data = _required(task)
        loader = self._loader(data, task, world, training=False)

        def evaluate() -> dict[str, float]:
            if forward is not None:
                strategy.sync_buffers(forward, world)
            return evaluation.evaluate(task, model, loader, _length(data), self._eval_micro(), world, precision)

        return evaluate

    def _cadence(self, plan: StepPlan) -> trainer.Cadence:
        train = self.config.train
        every = train.eval_every_steps
        if every is None:
            every = plan.steps_per_epoch * (train.eval_every_epochs or 0)
        return trainer.Cadence(log=self.config.log.every_steps, evaluate=every, save=self.config.checkpoint.every_steps or 2**62)

    def _loader(self, data: Dataset[Any], task: Task, world: World, training: bool) -> Loader:
        chunks = Chunks(data, task, self.config.seed, training, self.config.data.on_error)
        return Loader(chunks, self.config.data.workers, world.device)

    def _eval_micro(self) -> int:
        """The same for every world size, so that evaluation is."""
        return self.config.batch.micro or min(self.config.batch.global_ or 32, 256)

    @property
    def _checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"


def _length(data: Dataset[Any]) -> int:
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataError(
            f"{type(data).__name__} has no length", where="Task.train_data or Task.eval_data", remedy="return a map-style data set, with len and [index]"
        ) from error


def _lengths(data: Dataset[Any]) -> Any:
    """Lengths of the samples, where the data set has them (attribute `lengths`)."""
    lengths = getattr(data, "lengths", None)
    return None if lengths is None else np.asarray(lengths)


def _required(task: Task) -> Dataset[Any]:
    data = task.eval_data()
    if data is None:
        raise DataError("there is no evaluation data", where="Task.eval_data", remedy="set data.eval, or train.eval_every_epochs=0")
    if _length(data) == 0:
        raise DataError("the evaluation data set is empty", where="Task.eval_data", remedy="check data.eval")
    return data
