"""The composition root: from a RunConfig to objects, and from objects to a training, an evaluation, a prediction."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

import lockstep
from lockstep import build, config_file, run_directory
from lockstep.build import BuiltModel
from lockstep.checkpoint import files, finite, store
from lockstep.checkpoint import state as states
from lockstep.checkpoint.export import export_weights
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.store import Checkpoint
from lockstep.config import RunConfig, config_digest
from lockstep.data.fingerprint import fingerprint
from lockstep.data.loader import Loader, MicroBatch, MicroBatches, StepIterator, is_default
from lockstep.data.order import EvaluationPlan, StepPlan
from lockstep.distributed import sharding, signals, strategy
from lockstep.distributed.heartbeat import Phase
from lockstep.distributed.precision import Precision
from lockstep.distributed.signals import StopConsensus
from lockstep.distributed.world import World, join_world
from lockstep.engine import batch_norm, dry_run, loop, task_checks
from lockstep.engine import evaluate as evaluation
from lockstep.engine.ema import Ema
from lockstep.engine.out_of_memory import Guard
from lockstep.engine.schedule import Schedule, set_lr
from lockstep.engine.step import TrainState
from lockstep.errors import (
    CheckpointError,
    DataError,
    MemoryShortage,
    Preempted,
    TrainingError,
    UsageError,
    exits_are_failures,
)
from lockstep.tasks import registry
from lockstep.tasks.task import Task


class Trainer:
    """Trains, evaluates and predicts as a config says, on the ranks that the environment describes (torchrun's variables).

    Args:
        config: a `RunConfig`, a mapping with the same keys, or what the command line takes: a recipe, FILE.yaml, FILE.py:Task.
        run_dir: where everything is written; default `runs/<name>`.
        fresh: delete what an earlier run left there instead of resuming it.
        allow_change: keys of the config (or `data`) that may differ from the run's, when it is resumed.
        quiet: print nothing.
    """

    def __init__(
        self,
        config: RunConfig | Mapping[str, Any] | str,
        *,
        run_dir: str | Path | None = None,
        fresh: bool = False,
        allow_change: Sequence[str] = (),
        quiet: bool = False,
    ) -> None:
        if isinstance(config, str):
            config = config_file.load(config)
        elif not isinstance(config, RunConfig):
            config = config_file.parse(config, needs_task=False)
        self.config = config
        self.run_dir = Path(run_dir) if run_dir is not None else Path("runs") / config.name
        self.fresh, self.allow_change, self.quiet = fresh, tuple(allow_change), quiet

    def fit(self, task: Task | None = None, witness: Witness | None = None) -> dict[str, float]:
        """Train to the end, resuming what the run directory holds.

        Args:
            task: instead of the config's.
            witness: what is to see the training, on every rank.

        Returns:
            the last value of everything logged, such as `train/loss` and `eval/accuracy`.

        Raises:
            Preempted: SIGINT, SIGTERM or SIGUSR1 asked to stop; the state was saved, and `fit` again goes on.
            CheckpointError: the training went to its end, but a checkpoint could not be written.
        """
        with (
            signals.listening() as flag,
            self._join() as world,
            run_directory.claim(self.run_dir, self.config, world, self.fresh, self.allow_change) as config,
        ):
            self.config = config
            task = task or self.task()
            changed = run_directory.keep_source(self.run_dir, task, config, world, self.allow_change)
            prepared = self._training(task, world)
            prepared.built.told += changed
            writers = (
                []
                if world.rank
                else run_directory.writers(
                    self.run_dir,
                    config,
                    prepared.state,
                    prepared.stop,
                    prepared.built,
                    task.presenter(task).log_header(),
                    self.quiet,
                )
            )
            batches: Iterator[list[MicroBatch]] = prepared.batches
            if witness is not None:
                writers.append(witness)
                batches = witness.watch(prepared)
            try:
                return self._fit(task, prepared, batches, flag, writers)
            finally:
                for watcher in writers:
                    watcher.close()

    def _fit(
        self,
        task: Task,
        prepared: PreparedRun,
        batches: Iterator[list[MicroBatch]],
        flag: signals.StopFlag,
        writers: Sequence[loop.Writer],
    ) -> dict[str, float]:
        state, world, tell = prepared.state, prepared.state.world, partial(_tell_all, writers)
        cadence = self._cadence(prepared.plan)
        reading = self._evaluation_data(task, world) if cadence.evaluate else None
        notes = loop.set_training_mode(state.forward)
        batch_norm.check_smallest_micro_batch(
            strategy.unwrap_ddp(state.forward), prepared.plan, prepared.batches.loader.one, state.precision
        )
        for text in [*notes, *self._look_ahead(task, prepared, reading), *prepared.warnings]:
            tell(text)
        asked = StopConsensus(world, flag)
        evaluate: Callable[[], dict[str, float]] = dict
        if reading is not None:
            evaluate = self._evaluator(task, reading, lambda: state.forward, state.precision, world, tell, state, asked)
        background = self.config.checkpoint.mode == "async"
        saver = Saver(
            self._checkpoints, world, run_directory.retention(self.config), tell, background, prepared.allowed
        )
        add_metrics = partial(self._add_metrics, state, saver)
        keeper = loop.SaveHooks(self._save_function(prepared, saver), add_metrics, saver.kept, lambda: asked.elapsed_s)
        flag.saves = True

        def on_out_of_memory() -> None:
            before = prepared.plan.micro_batch
            if before == 1:
                remedy = "use more ranks with parallel.strategy=fsdp, compute.activation_checkpointing=true, or precision=bf16"
                raise TrainingError(
                    "a micro-batch of one sample does not fit into memory",
                    where=f"step {state.step + 1}",
                    remedy=remedy,
                )
            prepared.batches.halve(state.step)
            run_directory.remember_micro(self.run_dir, world, self._micro(world), prepared.plan.micro_batch)
            tell(
                f"out of memory at step {state.step + 1}: micro-batches of {prepared.plan.micro_batch} instead of {before} from here on"
            )

        try:
            if state.step >= prepared.stop:
                key = "steps" if self.config.train.steps else "epochs"
                tell(
                    f"{self.run_dir} is complete at step {state.step}: raise train.{key} to go on, or start anew with --fresh"
                )
            latest = loop.fit(
                state,
                batches,
                prepared.plan,
                prepared.stop,
                cadence,
                writers,
                evaluate,
                keeper,
                asked,
                prepared.evaluated,
                on_out_of_memory,
            )
            saver.finish()
            loop.check_any_update(state)
        except Preempted:
            saver.wait()
            if saver.failures and saver.saved != state.step:
                saver.finish()
            text = (
                f"stopped by {flag.name} at step {state.step} of {prepared.stop}, saved"
                if state.step
                else f"stopped by {flag.name} before the first step"
            )
            tell(text)
            raise Preempted(text) from None
        except MemoryShortage:
            run_directory.remember_micro(
                self.run_dir, world, self._micro(world), -(-prepared.plan.micro_batch // 2), from_any=True
            )
            raise
        finally:
            saver.close()
            for warning in prepared.warnings:  # again, for who reads the end
                tell(warning)
        return latest

    def _look_ahead(self, task: Task, prepared: PreparedRun, reading: EvaluationData | None) -> list[str]:
        """Before the first step of a new run: try on a few samples what it will need. Adds to the run's warnings.

        Returns:
            what is to be told besides.

        Raises:
            UsageError: `checkpoint.keep_best` names nothing that an evaluation gives.
        """
        state, world, best = prepared.state, prepared.state.world, self._best
        if best and reading is None:
            what = "nothing is evaluated that the best could be chosen by"
            remedy = "set train.eval_every_epochs or train.eval_every_steps, or checkpoint.keep_best=null"
            raise UsageError(what, where="checkpoint.keep_best", remedy=remedy)
        if state.step:  # a restart is to be quick
            saved = world.on_rank0(lambda: store.listed(self._checkpoints))
            known = sorted({name for one in saved for name in one.metrics})
            dry_run.check_best(best if known else None, known)
            return []
        forward = strategy.unwrap_ddp(state.forward)
        with dry_run.without_trace(forward, world, self.config.compute.compile is not None):
            loader, evaluates = prepared.batches.loader, reading is not None
            prepared.warnings += dry_run.look_at_losses(
                forward, loader, prepared.plan, state.precision, must_run=evaluates
            )
            if reading is None:
                return []
            return dry_run.look_at_evaluation(task, forward, reading.loader, reading.plan, world, state.precision, best)

    def evaluate(self, task: Task | None = None) -> dict[str, float]:
        """Loss and metrics of the newest checkpoint on the task's evaluation data, as in `engine.evaluate.evaluate`."""
        with self._join() as world:
            task = task or self.task()
            _, forward = self._trained(task, world)
            tell: Callable[[str], None] = _silently if self.quiet else partial(print, file=sys.stderr)
            reading, precision = self._evaluation_data(task, world), Precision(self.config.precision, world.device)
            return self._evaluator(task, reading, lambda: forward, precision, world, tell)()

    def predict(self, task: Task | None = None, data: Dataset[Any] | None = None) -> list[Any] | None:
        """The task's outputs for every sample of `data` (default: its evaluation data), in order; on rank 0, None elsewhere."""
        with self._join() as world:
            task = task or self.task()
            _, forward = self._trained(task, world)
            reading = self._evaluation_data(task, world, data)
            precision = Precision(self.config.precision, world.device)
            return evaluation.predict(task, forward, reading.loader, reading.plan, world, precision)

    @exits_are_failures()
    def describe(self, inputs: Sequence[str] = (), samples: int = 8, task: Task | None = None) -> list[dict[str, Any]]:
        """Predictions for people: of what `Presenter.inputs` reads from `inputs`, or of the first `samples` evaluation samples beside their truth."""
        task = task or self.task()
        if self._kept.is_dir():
            task.setup(self._kept, trained=True)
        presenter = task.presenter(task)
        data = task_checks.data(presenter.inputs(inputs), "Presenter.inputs") if inputs else _required(task)
        count = len(data) if inputs else min(samples, len(data))  # type: ignore[arg-type]
        where = getattr(data, "where", lambda number: inputs[number])
        outputs = self.predict(task, data if inputs else Subset(data, range(count)))
        heads = [
            {"input": where(number)} if inputs else {"sample": number, "truth": presenter.truth(data[number])}
            for number in range(count)
        ]
        return [
            head | presenter.show(data[number]) | presenter.describe(output)
            for number, (head, output) in enumerate(zip(heads, outputs or [], strict=True))
        ]

    def export(self, folder: str | Path, task: Task | None = None) -> Path:
        """Write the newest checkpoint's weights into `folder` as `model.safetensors`, under the names of the task's model,
        and what `Presenter.export` adds. Returns the file. The errors are those of `export_weights`."""
        with self._join() as world:
            task = task or self.task()
            model, _ = self._trained(task, world)
            about = {"lockstep": lockstep.__version__, "run": self.config.name}
            # One tensor at a time is whole on every rank; rank 0 keeps them in host memory, writes, and speaks for all.
            tensors = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
            whole = {name: sharding.gather_on_rank0(tensor, world) for name, tensor in tensors.items()}
            return world.on_rank0(
                lambda: export_weights(whole, Path(folder), about, partial(task.presenter(task).export, model))
            )

    # ---- the objects

    @exits_are_failures()
    def task(self) -> Task:
        """The config's task, newly made."""
        build.seed(self.config)
        return registry.build_task(self.config.task, self.config.data.train, self.config.data.eval)

    @contextlib.contextmanager
    def _join(self) -> Iterator[World]:
        config = self.config
        with join_world(config.device, config.parallel.timeout_s, self.run_dir) as world, exits_are_failures():
            yield world

    def _training(self, task: Task, world: World) -> PreparedRun:
        """Everything that `loop.fit` needs, with the newest checkpoint loaded."""
        config = self.config
        found, complaints = store.newest(self._checkpoints, world)
        self._attach(task, world, trained=found is not None)
        build.seed(config)
        data = task_checks.data(task.train_data(), "Task.train_data")
        plan = self._plan(data, world)
        length = config.train
        stop = length.steps or max((length.epochs or 1) * plan.steps_per_epoch, length.min_steps or 0)
        print_of_data = world.broadcast(fingerprint(data, config.data.workers > 0) if world.rank == 0 else None)
        built, forward = build.assemble(
            config, task, world, plan.steps_per_epoch, found.step if found else 0, init=found is None
        )
        model = built.model
        state = TrainState(
            forward=forward,
            optimizer=build.optimizer(config, model, built.blocks, strategy.is_sharded(forward)),
            precision=Precision(config.precision, world.device, world.size),
            schedule=Schedule(total=stop, steps_per_epoch=plan.steps_per_epoch, **config.schedule.model_dump()),
            world=world,
            seed=config.seed,
            clip_norm=config.optim.clip_norm,
            coefficients=task_checks.coefficients(task),
            must_agree_on_weights=config.data.on_error == "skip",
            averages=Ema(model, config.train.ema_decay) if config.train.ema_decay else None,
            buckets=build.buckets(config.parallel),
            unfreezing=built.unfreezing,
            guard=Guard(config.compute.halve_on_oom and world.device.type == "cuda"),
        )
        states.capture(model, state.optimizer)  # what cannot be saved is better known now than after the last step
        loader = self._loader(data, task, world, training=True)
        if found is not None:
            built.told += self._resume(found, state, model, print_of_data)
            if world.rank == 0 and not self.quiet:
                print("\n".join([*complaints, f"resuming {self.run_dir} at step {state.step}"]))
        tensors, _ = states.capture(model, state.optimizer, state.averages.tensors if state.averages else None)
        feed = StepIterator(loader, plan, world.rank, state.step, stop)
        allowed = finite.at_start(model, tensors, world)
        warnings = list(found.manifest.get("warnings", ())) if found else []
        return PreparedRun(built, state, feed, stop, print_of_data, found.metrics if found else {}, allowed, warnings)

    def _plan(self, data: Dataset[Any], world: World) -> StepPlan:
        config = self.config
        length = len(data)  # type: ignore[arg-type]
        if length == 0:
            raise DataError("the training data set is empty", where="Task.train_data", remedy="check data.train")
        global_batch = config.batch.global_ or 1
        if config.data.drop_last and length < global_batch:
            remedy = "lower batch.global, or set data.drop_last=false"
            raise DataError(
                f"{length} samples do not fill one batch of {global_batch}", where="data.drop_last", remedy=remedy
            )
        micro = run_directory.remembered_micro(self.run_dir, world, self._micro(world))
        return StepPlan(length, global_batch, micro, world.size, config.seed, config.data.drop_last, _lengths(data))

    def _micro(self, world: World) -> int:
        """The micro-batch that the config asks for."""
        batch = self.config.batch
        return min(batch.micro or batch.global_ or 1, -(-(batch.global_ or 1) // world.size))

    def _resume(self, found: Checkpoint, state: TrainState, model: nn.Module, data: dict[str, Any]) -> list[str]:
        """Load a checkpoint; what is to be told about it."""
        saved = found.manifest["data"]
        if saved != data and "data" not in self.allow_change:
            counts = (
                f"{saved['samples']} samples then, {data['samples']} now"
                if saved["samples"] != data["samples"]
                else "samples differ"
            )
            raise UsageError(
                f"the training data are not those that the run began with: {counts}",
                where=str(found.path),
                remedy="give the same data, --allow-change data to go on with these, or --fresh to start anew",
            )
        told = run_directory.same_curve(self.config, state, found.manifest, self.allow_change)
        averages = (
            state.averages.tensors if state.averages and any(name.startswith("ema.") for name in found.index) else None
        )
        states.check_fits(found.index, model, averages)
        optimizer = state.optimizer if found.manifest["optimizer"] == self._kind_of_optimizer() else None
        if optimizer is None:
            told.append(f"the state of {found.manifest['optimizer'][0]} is left out: the optimizer is another now")
        needed = states.wanted(found.index, model, optimizer, averages)
        states.restore(files.read(found.path, found.index, needed), found.values, model, optimizer, averages)
        if state.averages and averages is None:
            state.averages = Ema(model, self.config.train.ema_decay or 0.0)
            told.append("averages begin with the weights of this step")
        state.precision.load(found.manifest["loss_scale"])
        state.step, state.skipped = found.step, found.manifest["skipped"]
        if state.step > state.skipped:  # the rate of the last update, which is logged where no other follows
            set_lr(state.optimizer, state.schedule(state.step - state.skipped - 1))
        return told

    def _kind_of_optimizer(self) -> list[Any]:
        """What its state looks like."""
        return [self.config.optim.name, json.loads(json.dumps(self.config.optim.args, sort_keys=True))]

    def _trained(self, task: Task, world: World) -> tuple[nn.Module, nn.Module]:
        """The model with the newest checkpoint's weights (their average, where the run kept one), and what runs it."""
        found, complaints = store.newest(self._checkpoints, world)
        if found is None:
            raise CheckpointError(
                "no checkpoint", where=str(self._checkpoints), remedy="train first, or give the run's own directory"
            )
        self._attach(task, world, trained=True)
        built, forward = build.assemble(self.config, task, world)
        if world.rank == 0 and not self.quiet:
            for text in (*complaints, *built.told, *run_directory.changed_source(self.run_dir, task, self.config)):
                print(text, file=sys.stderr)
        build.load(found, built.model)
        return built.model, forward

    def _save_function(self, prepared: PreparedRun, saver: Saver) -> Callable[[dict[str, float]], None]:
        state = prepared.state

        def save(evaluated: dict[str, float]) -> None:
            before = state.world.heartbeat.phase
            state.world.heartbeat.enter(Phase.SAVING)
            strategy.sync_buffers(state.forward, state.world)
            tensors, values = states.capture(
                prepared.built.model, state.optimizer, state.averages.tensors if state.averages else None
            )
            about: dict[str, Any] = {
                "step": state.step,
                "skipped": state.skipped,
                "loss_scale": state.precision.state(),
                "metrics": evaluated,
            }
            versions = {"lockstep": lockstep.__version__, "torch": torch.__version__, "world": state.world.size}
            about |= {
                "data": prepared.data,
                "optimizer": self._kind_of_optimizer(),
                "config": config_digest(self.config),
                "versions": versions,
            }
            about |= {"schedule_steps": state.schedule.length, "warnings": prepared.warnings}
            saver.save(state.step, tensors, values, about)
            state.world.heartbeat.enter(Phase(before))

        return save

    def _add_metrics(self, state: TrainState, saver: Saver, evaluated: dict[str, float]) -> None:
        """Add the results of an evaluation to the checkpoint of its step."""
        saver.add_metrics(state.step, evaluated)
        dry_run.check_best(self._best, list(evaluated))

    def _evaluator(
        self,
        task: Task,
        reading: EvaluationData,
        forward: Callable[[], nn.Module],
        precision: Precision,
        world: World,
        tell: Callable[[str], None],
        state: TrainState | None = None,
        asked: StopConsensus | None = None,
    ) -> Callable[[], dict[str, float]]:
        """A function that evaluates what `forward` gives, and tells of it; within a training its averaged weights, until somebody asks to stop."""
        data, loader, plan = reading.data, reading.loader, reading.plan
        tables, presenter = run_directory.Tables(self.run_dir, tell), task.presenter(task)
        show_samples = not is_default(presenter.report)

        def show(values: dict[str, Any], outputs: list[tuple[int, Any]]) -> None:
            if state is not None:
                tables.keep(state.step, values)
            if text := presenter.report(values, [(data[index], output) for index, output in outputs]):
                tell(text)

        def tick() -> None:
            if asked is not None and asked():
                raise Preempted

        def evaluate() -> dict[str, float]:
            with contextlib.ExitStack() as stack:
                if asked is not None:
                    asked.restart()
                    stack.callback(asked.restart)
                if state is not None:
                    strategy.sync_buffers(state.forward, world)
                    if state.averages is not None:
                        sharding.reshard(state.forward)
                        stack.enter_context(state.averages.applied())
                bare = strategy.unwrap_ddp(forward())
                return evaluation.evaluate(task, bare, loader, plan, world, precision, tick, show, show_samples)

        return evaluate

    def _cadence(self, plan: StepPlan) -> loop.Intervals:
        train = self.config.train
        every = train.eval_every_steps
        if every is None:
            every = plan.steps_per_epoch * (train.eval_every_epochs or 0)
        keep = self.config.checkpoint
        return loop.Intervals(
            log=self.config.log.every_steps,
            evaluate=every,
            save=keep.every_steps or 2**62,
            save_s=60 * (keep.every_minutes or 0),
            save_evaluated=keep.keep_best is not None,
        )

    def _loader(self, data: Dataset[Any], task: Task, world: World, training: bool) -> Loader:
        chunks = MicroBatches(data, task, self.config.seed, training, self.config.data.on_error)
        return Loader(chunks, self.config.data.workers, world.device, self.config.compute.channels_last)

    def _evaluation_data(self, task: Task, world: World, data: Dataset[Any] | None = None) -> EvaluationData:
        """`data`, by default the task's evaluation data, ready to be read: cut alike for every world size."""
        data = task_checks.data(data, "the data to predict") if data is not None else _required(task)
        micro = self.config.batch.micro or min(self.config.batch.global_ or 32, 256)
        plan = EvaluationPlan(len(data), micro, _lengths(data))  # type: ignore[arg-type]
        return EvaluationData(data, self._loader(data, task, world, training=False), plan)

    def _attach(self, task: Task, world: World, trained: bool) -> None:
        """Rank 0 writes what the task keeps with the run, the others read it."""

        def write() -> None:
            if not trained:  # an earlier start that came to no checkpoint may have had another config
                shutil.rmtree(self._kept, ignore_errors=True)
            task.setup(self._kept, trained)

        world.on_rank0(write)
        if world.rank:
            task.setup(self._kept, trained)

    @property
    def _best(self) -> str | None:
        """Name of the result by which the best checkpoint is chosen."""
        best = self.config.checkpoint.keep_best
        return best.split()[1] if best else None

    @property
    def _checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def _kept(self) -> Path:
        return self.run_dir / "task"


@dataclass
class EvaluationData:
    """Samples to evaluate, and how they are read."""

    data: Dataset[Any]
    loader: Loader
    plan: EvaluationPlan


@dataclass
class PreparedRun:
    """A training on this rank, ready to begin or to go on. data: fingerprint of the training data. evaluated: results at `state.step`, if any.
    allowed: tensors that need not be finite. warnings: what is told at the beginning and at the end of every start of the run."""

    built: BuiltModel
    state: TrainState
    batches: StepIterator
    stop: int
    data: dict[str, Any]
    evaluated: dict[str, float]
    allowed: finite.Grades
    warnings: list[str]

    @property
    def plan(self) -> StepPlan:
        """How the batches are cut now."""
        return self.batches.plan


class Witness(loop.Writer, Protocol):
    """Sees a training on every rank, between its steps, and leaves no trace in it."""

    def watch(self, prepared: PreparedRun) -> Iterator[list[MicroBatch]]:
        """The batches of `prepared`, passed on: when one is asked for, the step before it is done."""
        ...


def _silently(_: str) -> None:
    pass


def _tell_all(writers: Sequence[loop.Writer], text: str) -> None:
    for watcher in writers:
        watcher.message(text)


def _lengths(data: Dataset[Any]) -> Any:
    """Lengths of the samples, where the data set has them (attribute `lengths`)."""
    lengths = getattr(data, "lengths", None)
    return None if lengths is None else np.asarray(lengths)


def _required(task: Task) -> Dataset[Any]:
    found = task.eval_data()
    if found is None:
        raise DataError(
            "there is no evaluation data", where="Task.eval_data", remedy="set data.eval, or train.eval_every_epochs=0"
        )
    data = task_checks.data(found, "Task.eval_data")
    if len(data) == 0:  # type: ignore[arg-type]
        raise DataError("the evaluation data set is empty", where="Task.eval_data", remedy="check data.eval")
    return data
