"""`Trainer`: train, evaluate, predict and export as a config says."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

import lockstep
from lockstep import build, config_file, resume, run_directory
from lockstep.build import BuiltModel, EvaluationData, PreparedRun
from lockstep.checkpoint import store
from lockstep.checkpoint.export import export_weights
from lockstep.checkpoint.saver import Saver
from lockstep.config import RunConfig
from lockstep.data.loader import MicroBatch, is_default
from lockstep.distributed import signals
from lockstep.distributed.precision import Precision
from lockstep.distributed.sharded_tensor import gather_on_rank0
from lockstep.distributed.signals import StopConsensus, StopFlag
from lockstep.distributed.world import World, join_world
from lockstep.engine import batch_norm, dry_run, loop, task_checks
from lockstep.engine import evaluate as evaluation
from lockstep.errors import CheckpointError, MemoryShortage, Preempted, TrainingError, exits_are_failures
from lockstep.observe import metric_arrays
from lockstep.observe.metric_arrays import MetricArrays
from lockstep.observe.writer import WriteGuard, Writer
from lockstep.tasks import registry
from lockstep.tasks.task import Task


class Trainer:
    """Trains a model as a config says, and evaluates, predicts with and exports the trained model.

    The ranks are those that torchrun's environment variables describe. Without these variables there is one rank.

    Args:
        config: a `RunConfig`, a mapping with the same keys, or a text as on the command line: a recipe, FILE.yaml or
            FILE.py:Task.
        run_dir: the folder into which everything is written. None: `runs/<name>`.
        fresh: delete the run that the folder holds, and begin anew. Otherwise that run is resumed.
        allow_change: keys of the config (or `data`, or `task`) that may differ from those of the resumed run.
        quiet: print nothing.
    """

    model: nn.Module | None = None
    """After `fit`: the trained model. With FSDP its parameters are this rank's shards."""
    results: Mapping[str, float] = {}
    """After `fit`: the results that it returned."""

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

    # ---- training

    def fit(self, task: Task | None = None, recorder: Recorder | None = None) -> dict[str, float]:
        """Train to the end. If the run directory holds a run, that run is resumed.

        Args:
            task: the task to train, instead of the config's task.
            recorder: records the training on every rank.

        Returns:
            the last logged value of each name, such as `train/loss` and `eval/accuracy`.

        Raises:
            Preempted: SIGINT, SIGTERM or SIGUSR1 asked to stop; the state was saved, and `fit` again goes on.
            CheckpointError: the training reached its end, but a checkpoint could not be written.
            LockstepError: the config, the data or the model cannot be used, or the training failed.
        """
        with (
            signals.listening() as flag,
            self._join() as world,
            run_directory.claim(self.run_dir, self.config, world, self.fresh, self.allow_change) as config,
        ):
            self.config = config
            task = task or self.task()
            messages = run_directory.keep_source(self.run_dir, task, config, world, self.allow_change)
            prepared = self._prepare(task, world)
            prepared.built.messages += messages
            self.model = prepared.built.model
            writers = self._writers(task, prepared)
            batches: Iterator[list[MicroBatch]] = prepared.batches
            if recorder is not None:
                writers.append(recorder)
                batches = recorder.record_steps(prepared)
            try:
                self.results = self._train(task, prepared, batches, flag, writers)
            finally:
                for writer in writers:
                    writer.close()
            return dict(self.results)

    def _prepare(self, task: Task, world: World) -> PreparedRun:
        """Make the run on this rank, and load the newest checkpoint, if there is one."""
        checkpoint, complaints = store.newest(self._checkpoints, world)
        self._set_up(task, world, trained=checkpoint is not None)
        asked = build.asked_micro_batch(self.config, world)
        micro_batch = run_directory.remembered_micro_batch(self.run_dir, world, asked=asked)
        prepared = build.prepare_run(self.config, task, world, micro_batch=micro_batch, checkpoint=checkpoint)
        if checkpoint is not None:
            prepared.built.messages += resume.restore(checkpoint, prepared, self.config, self.allow_change)
            if world.rank == 0 and not self.quiet:
                print("\n".join([*complaints, f"resuming {self.run_dir} at step {prepared.state.step}"]))
        prepared.may_be_infinite = resume.may_be_infinite(prepared)
        return prepared

    def _writers(self, task: Task, prepared: PreparedRun) -> list[Writer]:
        if prepared.state.world.rank:
            return []
        return build.open_writers(
            self.config,
            self.run_dir,
            prepared.state,
            stop=prepared.stop,
            built=prepared.built,
            log_header=task.presenter(task).log_header(),
            quiet=self.quiet,
        )

    def _train(
        self,
        task: Task,
        prepared: PreparedRun,
        batches: Iterator[list[MicroBatch]],
        flag: StopFlag,
        writers: Sequence[Writer],
    ) -> dict[str, float]:
        """Make all checks that are possible before the first step, then run the loop."""
        state, world, tell = prepared.state, prepared.state.world, partial(_tell_all, writers)
        intervals = build.intervals(self.config, prepared.plan)
        evaluated_data = build.evaluation_data(self.config, task, world) if intervals.evaluate else None
        notes = loop.set_training_mode(state.strategy)
        with state.strategy.inference() as forward:
            batch_norm.check_smallest_micro_batch(
                forward, prepared.plan, read=prepared.batches.loader.batch_of, precision=state.precision
            )
        for text in [*notes, *self._look_ahead(task, prepared, evaluated_data), *prepared.warnings]:
            tell(text)
        consensus = StopConsensus(world, flag)
        saver = Saver(
            self._checkpoints,
            world,
            run_directory.retention(self.config),
            tell=tell,
            in_background=self.config.checkpoint.mode == "async",
            allowed=prepared.may_be_infinite,
        )
        arrays = WriteGuard(metric_arrays.FILE, partial(MetricArrays, self.run_dir, tell), tell)
        hooks = loop.Hooks(
            evaluate=partial(self._evaluate_in_training, task, prepared, evaluated_data, consensus, tell, arrays),
            save=resume.save_function(prepared, saver, self.config),
            add_metrics=partial(self._add_metrics, prepared, saver),
            describe_checkpoints=saver.kept,
            elapsed_s=lambda: consensus.elapsed_s,
            stop_requested=consensus,
            on_out_of_memory=partial(self._halve_micro_batch, prepared, tell),
        )
        flag.saves = True
        try:
            if state.step >= prepared.stop:
                key = "steps" if self.config.train.steps else "epochs"
                done = f"{self.run_dir} is complete at step {state.step}"
                tell(f"{done}: raise train.{key} to go on, or start anew with --fresh")
            latest = loop.fit(
                state,
                batches,
                plan=prepared.plan,
                stop=prepared.stop,
                intervals=intervals,
                hooks=hooks,
                writers=writers,
                evaluated=prepared.evaluated,
            )
            saver.finish()
            loop.check_any_update(state)
        except Preempted:
            saver.wait()
            if saver.failures and saver.saved != state.step:
                saver.finish()
            text = f"stopped by {flag.name} before the first step"
            if state.step:
                text = f"stopped by {flag.name} at step {state.step} of {prepared.stop}, saved"
            tell(text)
            raise Preempted(text) from None
        except MemoryShortage:
            self._remember_micro_batch(prepared, -(-prepared.plan.micro_batch // 2), from_any=True)
            raise
        finally:
            saver.close()
            for warning in prepared.warnings:  # again, for a reader who looks at the end
                tell(warning)
        return latest

    def _look_ahead(self, task: Task, prepared: PreparedRun, evaluated: EvaluationData | None) -> list[str]:
        """Before the first step of a new run, try the loss and the evaluation on a few samples.

        Adds to the run's warnings.

        Returns:
            further messages for the log.

        Raises:
            UsageError: `checkpoint.keep_best` names no result of an evaluation.
        """
        state, best = prepared.state, self._best
        if best:
            dry_run.check_is_evaluated(evaluated is not None)
        if state.step:  # a restart must be quick
            dry_run.check_best_of_saved(best, self._checkpoints, state.world)
            return []
        compiled = self.config.compute.compile is not None
        with state.strategy.inference() as forward, dry_run.without_trace(forward, state.world, compiled):
            prepared.warnings += dry_run.look_at_losses(
                forward,
                prepared.batches.loader,
                prepared.plan,
                precision=state.precision,
                must_run=evaluated is not None,
            )
            if evaluated is None:
                return []
            return dry_run.look_at_evaluation(
                task,
                forward,
                evaluated.loader,
                plan=evaluated.plan,
                world=state.world,
                precision=state.precision,
                best=best,
            )

    def _evaluate_in_training(
        self,
        task: Task,
        prepared: PreparedRun,
        evaluated: EvaluationData | None,
        consensus: StopConsensus,
        tell: Callable[[str], None],
        arrays: WriteGuard,
    ) -> dict[str, float]:
        """Evaluate the averaged weights, or the weights where there are no averages.

        Raises:
            Preempted: a rank was asked to stop.
        """
        state = prepared.state
        assert evaluated is not None

        def tick() -> None:
            if consensus():
                raise Preempted

        def show(values: dict[str, Any], outputs: list[tuple[int, Any]]) -> None:
            arrays.record({"step": state.step, **values})
            _report(task, evaluated, values, outputs, tell)

        with contextlib.ExitStack() as stack:
            consensus.restart()
            stack.callback(consensus.restart)
            state.strategy.sync_buffers()
            forward = stack.enter_context(state.strategy.inference())
            if state.averages is not None:
                stack.enter_context(state.averages.applied())
            return evaluation.evaluate(
                task,
                forward,
                evaluated.loader,
                plan=evaluated.plan,
                world=state.world,
                precision=state.precision,
                tick=tick,
                show=show,
                show_samples=_reports(task),
            )

    def _halve_micro_batch(self, prepared: PreparedRun, tell: Callable[[str], None]) -> None:
        """Go on with micro-batches of half the size, from the step that did not fit into memory.

        Raises:
            TrainingError: the micro-batch is one sample.
        """
        step, before = prepared.state.step, prepared.plan.micro_batch
        if before == 1:
            remedy = (
                "use more ranks with parallel.strategy=fsdp, compute.activation_checkpointing=true, or precision=bf16"
            )
            what = "a micro-batch of one sample does not fit into memory"
            raise TrainingError(what, where=f"step {step + 1}", remedy=remedy)
        prepared.batches.halve(step)
        after = prepared.plan.micro_batch
        self._remember_micro_batch(prepared, after)
        tell(f"out of memory at step {step + 1}: micro-batches of {after} instead of {before} from here on")

    def _remember_micro_batch(self, prepared: PreparedRun, size: int, from_any: bool = False) -> None:
        world = prepared.state.world
        asked = build.asked_micro_batch(self.config, world)
        run_directory.remember_micro_batch(self.run_dir, world, asked=asked, size=size, from_any_rank=from_any)

    def _add_metrics(self, prepared: PreparedRun, saver: Saver, evaluated: dict[str, float]) -> None:
        """Add the results of an evaluation to the checkpoint of its step."""
        saver.add_metrics(prepared.state.step, evaluated)
        dry_run.check_best(self._best, list(evaluated))

    # ---- a trained model

    def evaluate(self, task: Task | None = None) -> dict[str, float]:
        """Loss and metrics of the newest checkpoint on the task's evaluation data.

        Returns:
            results by name, as `engine.evaluate.evaluate` gives them.
        """
        with self._join() as world:
            task = task or self.task()
            strategy = self._trained(task, world).strategy
            tell: Callable[[str], None] = _say_nothing if self.quiet else partial(print, file=sys.stderr)
            evaluated = build.evaluation_data(self.config, task, world)
            precision = Precision(self.config.precision, world.device)
            with strategy.inference() as forward:
                return evaluation.evaluate(
                    task,
                    forward,
                    evaluated.loader,
                    plan=evaluated.plan,
                    world=world,
                    precision=precision,
                    show=lambda values, outputs: _report(task, evaluated, values, outputs, tell),
                    show_samples=_reports(task),
                )

    def predict(self, task: Task | None = None, data: Dataset[Any] | None = None) -> list[Any] | None:
        """The task's outputs for every sample of `data` (default: its evaluation data), in the order of the samples.

        Returns:
            outputs on rank 0, None on the other ranks.
        """
        with self._join() as world:
            task = task or self.task()
            strategy = self._trained(task, world).strategy
            evaluated = build.evaluation_data(self.config, task, world, data)
            precision = Precision(self.config.precision, world.device)
            with strategy.inference() as forward:
                return evaluation.predict(
                    task, forward, evaluated.loader, plan=evaluated.plan, world=world, precision=precision
                )

    @exits_are_failures()
    def describe(self, inputs: Sequence[str] = (), samples: int = 8, task: Task | None = None) -> list[dict[str, Any]]:
        """Predictions in a form for people: a dict for each sample.

        Args:
            inputs: read by the task (files, texts). Empty: the first `samples` evaluation samples, beside their truth.
        """
        task = task or self.task()
        if self._kept.is_dir():
            task.setup(self._kept, trained=True)
        presenter = task.presenter(task)
        if inputs:
            data = task_checks.data(presenter.inputs(inputs), "Presenter.inputs")
            count = len(data)  # type: ignore[arg-type]
            place = getattr(data, "where", lambda number: inputs[number])
            heads = [{"input": place(number)} for number in range(count)]
        else:
            evaluated = build.required_evaluation_data(task)
            count = min(samples, len(evaluated))  # type: ignore[arg-type]
            data = Subset(evaluated, range(count))
            heads = [{"sample": number, "truth": presenter.truth(data[number])} for number in range(count)]
        outputs = self.predict(task, data) or []
        return [
            head | presenter.show(data[number]) | presenter.describe(output)
            for number, (head, output) in enumerate(zip(heads, outputs, strict=True))
        ]

    def export(self, folder: str | Path, task: Task | None = None) -> Path:
        """Write the newest checkpoint's weights into `folder`: `model.safetensors`, and files that the task adds.

        The tensors have the names that they have in the task's model.

        Returns:
            the file.

        Raises:
            LockstepError: as `checkpoint.export.export_weights`.
        """
        with self._join() as world:
            task = task or self.task()
            model = self._trained(task, world).model
            about = {"lockstep": lockstep.__version__, "run": self.config.name}
            # Every rank gathers one tensor at a time. Rank 0 keeps the tensors in host memory, and writes.
            tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
            whole = {name: gather_on_rank0(tensor, world) for name, tensor in tensors.items()}
            return world.on_rank0(
                lambda: export_weights(whole, Path(folder), about, partial(task.presenter(task).export, model))
            )

    def _trained(self, task: Task, world: World) -> BuiltModel:
        """The model with the newest checkpoint's weights (their moving average, where there is an average)."""
        checkpoint, complaints = store.newest(self._checkpoints, world)
        if checkpoint is None:
            remedy = "train first, or give the run's own directory"
            raise CheckpointError("no checkpoint", where=str(self._checkpoints), remedy=remedy)
        self._set_up(task, world, trained=True)
        built = build.build_model(self.config, task, world)
        if world.rank == 0 and not self.quiet:
            changes = run_directory.changed_source(self.run_dir, task, self.config)
            for text in (*complaints, *built.messages, *changes):
                print(text, file=sys.stderr)
        resume.load_trained_weights(checkpoint, built.model)
        return built

    # ---- shared by the methods above

    @exits_are_failures()
    def task(self) -> Task:
        """A new object of the config's task."""
        build.seed_everything(self.config)
        return registry.build_task(self.config.task, self.config.data.train, self.config.data.eval)

    @contextlib.contextmanager
    def _join(self) -> Iterator[World]:
        config = self.config
        with join_world(config.device, config.parallel.timeout_s, self.run_dir) as world, exits_are_failures():
            yield world

    def _set_up(self, task: Task, world: World, trained: bool) -> None:
        """Set up the task: rank 0 writes the files that the task keeps with the run, then the other ranks read them."""

        def write() -> None:
            if not trained:  # an earlier start without a checkpoint may have had another config
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
        """The folder of the files that the task keeps with the run."""
        return self.run_dir / "task"


class Recorder(Writer):
    """Records a training on every rank, between its steps, and leaves no trace in it."""

    def record_steps(self, prepared: PreparedRun) -> Iterator[list[MicroBatch]]:
        """Pass the batches of `prepared` on. When the next batch is asked for, the step before it is done."""
        raise NotImplementedError


def _reports(task: Task) -> bool:
    """Whether the task has a report of its own, which may show samples."""
    return not is_default(task.presenter(task).report)


def _report(
    task: Task,
    evaluated: EvaluationData,
    values: dict[str, Any],
    outputs: list[tuple[int, Any]],
    tell: Callable[[str], None],
) -> None:
    """Log the text that the task's report gives for an evaluation."""
    if text := task.presenter(task).report(values, [(evaluated.data[index], output) for index, output in outputs]):
        tell(text)


def _say_nothing(_: str) -> None:
    pass


def _tell_all(writers: Sequence[Writer], text: str) -> None:
    for writer in writers:
        writer.message(text)
