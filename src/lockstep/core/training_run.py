"""One training from its first checks to its last checkpoint: the loop, and what the loop calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lockstep.core import (
    batch_norm,
    build,
    caller,
    devices,
    evaluation_run,
    loop,
    run_data,
    run_directory,
)
from lockstep.core.build import PreparedRun
from lockstep.core.built_in import BuiltInPart
from lockstep.core.checkpoint import choice, manifest
from lockstep.core.checkpoint.saver import Saver
from lockstep.core.checks import Checks
from lockstep.core.config.sections import RunConfig
from lockstep.core.data.data_check import check_data
from lockstep.core.data.loader import Loader, MicroBatch, print_warning
from lockstep.core.errors import CheckpointError, Preempted
from lockstep.core.evaluation_run import Viewer, named_results
from lockstep.core.joined_parts import JoinedParts
from lockstep.core.log_window import LogWindow
from lockstep.core.parallel.buffers import restored_state
from lockstep.core.parallel.signals import StopConsensus, StopFlag
from lockstep.core.part import Part
from lockstep.core.resume import RunKeeper
from lockstep.core.run_data import EvaluationData
from lockstep.core.task import Task
from lockstep.core.writer import Writer, tell


@dataclass(frozen=True)
class Ending:
    """The end of a training, for the last lines of its log."""

    step: int
    """The last step of the run."""
    epoch: float
    """Passes through the training data until then."""
    trained_s: float
    """Seconds of training, over all starts."""
    samples_per_s: float | None
    """Training samples per second of this start, evaluations and saves included. None: this start made no step."""
    since: int
    """The step from which this start went on."""
    compared: tuple[str, str]
    """`min` or `max`, and the name of the result by which the best evaluation is found."""
    kept: Sequence[int]
    """Steps of the checkpoints on the disk."""
    latest: Mapping[str, float]
    """The last value of everything logged."""


@dataclass
class TrainingRun:
    """A prepared run on this rank, with all that its training needs."""

    task: Task
    prepared: PreparedRun
    config: RunConfig
    run_dir: Path
    flag: StopFlag
    """Says whether a signal asked this process to stop."""
    writers: Sequence[Writer]
    """Receive the log. Empty but on rank 0."""
    evaluated_tasks: Mapping[str, Task]
    """For each set of evaluation data, by its name, the task that has it. The first is `task`."""
    evaluated_at_once: int
    """Samples of a micro-batch of an evaluation."""
    keep_record: Callable[[], None] = lambda: None
    """Writes what the run is. Called when its state is loaded and all checks are made, before the first step."""
    own_parts: Sequence[Part] = ()
    """Parts that the user adds."""
    checks: Checks = field(default_factory=Checks)
    """Look for faults before the first step and after it."""
    built_in: Callable[[loop.Intervals], Sequence[BuiltInPart]] = lambda intervals: ()
    """Makes Lockstep's own Parts. Gets when the loop logs, evaluates and saves."""
    viewers: Sequence[Viewer] = ()
    """Show evaluations to people."""
    last_lines: Callable[[Ending], str] = lambda ending: ""
    """The last lines of the log."""
    consensus: StopConsensus = field(init=False)
    evaluated: dict[str, EvaluationData] = field(init=False, default_factory=dict)
    """The sets of data that the training evaluates, by name. Empty: nothing."""

    def __post_init__(self) -> None:
        # Nothing that `self` holds may refer to `self`: a cycle is freed late, and loader workers would live on.
        self.consensus = StopConsensus(self.prepared.state.world, self.flag)

    def tell(self, text: str) -> None:
        """Write lines for people into all logs."""
        tell(self.writers, text)

    def train(self, batches: Iterator[list[MicroBatch]]) -> dict[str, float]:
        """Make all checks that are possible before the first step, then run the loop.

        Args:
            batches: the micro-batches of the prepared run, which somebody may look at on their way.

        Returns:
            the last value of everything logged.

        Raises:
            Preempted: a rank was asked to stop. The state is saved.
            TrainingError: see `loop.fit`.
        """
        prepared, state = self.prepared, self.prepared.state
        state.world.heartbeat.step = state.step  # this process may have trained before
        intervals, parts = self._check_before_first_step()
        self.keep_record()
        self.consensus = StopConsensus(state.world, self.flag)  # its clock begins here
        self.consensus.wants_end = parts.wants_end
        saver, begun = self._saver(), state.step
        keeper = RunKeeper(
            prepared,
            saver,
            self.config,
            parts,
            self.consensus,
            self.checks,
        )
        self.flag.saves = True
        try:
            self._tell_if_complete(parts)
            latest = loop.fit(
                state,
                self.checks.watched(batches),
                plan=prepared.plan,
                stop=prepared.stop,
                intervals=intervals,
                parts=parts,
                consensus=self.consensus,
                evaluate=self.evaluate,
                keeper=keeper,
                writers=self.writers,
                evaluated=prepared.evaluated,
                stopping=prepared.stopping,
            )
            saver.finish()
            self._give_artifacts()
            self._tell_why_it_ended(parts)
            loop.check_any_update(state)
            self._tell_end(latest, since=begun)
        except Preempted:
            raise self._preempted(saver) from None
        finally:
            saver.close()
            for loader in self._loaders:  # a recorder among the writers may hold the loader: again, no cycles
                loader.tell = print_warning
            for warning in prepared.warnings:  # again, for a reader who looks at the end
                self.tell(warning)
        return latest

    def _check_before_first_step(self) -> tuple[loop.Intervals, JoinedParts]:
        """Open the evaluation data, make all checks that are possible now, and draw what people look at before a run.

        Returns:
            when the loop logs, evaluates and saves; and the Parts, with their states.
        """
        prepared = self.prepared
        intervals = build.intervals(self.config, prepared.plan)
        if not intervals.evaluate and type(self.task).eval_data is not Task.eval_data:
            self.tell("note: nothing is evaluated; train.eval_every_epochs=1 evaluates after each epoch")
        if intervals.evaluate:
            self.evaluated = self._evaluation_data()
            intervals = intervals if self.evaluated else replace(intervals, evaluate=0)
        if prepared.state.averages is not None:
            decay = prepared.state.averages.decay
            self.tell(
                f"evaluations and exports use the averages of the weights (train.ema_decay={decay:g}), not the weights"
            )
        is_first = prepared.state.world.rank == 0
        for loader in self._loaders if is_first else ():
            loader.tell = partial(tell, self.writers)
        note = devices.of(prepared.state.world.device).note()
        show = partial(tell, self.writers)
        parts = join_parts(prepared, self.built_in(intervals), self.own_parts, folder=self.run_dir, tell=show)
        kept = parts.restore(prepared.parts) if prepared.state.step else []
        notes = [*([note] if note else []), *kept]
        for text in [*notes, *self._check_model(), *self.checks.before_first_step(self.evaluated), *prepared.warnings]:
            self.tell(text)
        for viewer in self.viewers:
            viewer.begin(prepared.state.step, next(iter(self.evaluated.values()), None))
        return intervals, parts

    @property
    def _loaders(self) -> list[Loader]:
        return [self.prepared.batches.loader, *(evaluated.loader for evaluated in self.evaluated.values())]

    def _tell_if_complete(self, parts: JoinedParts) -> None:
        state, stopping = self.prepared.state, self.prepared.stopping
        key = "train.steps" if self.config.train.steps else "train.epochs"
        if state.step < self.prepared.stop:
            key = "train.stop_when" if stopping.reason() else "train.max_time" if stopping.time_is_up(0.0) else ""
        if not key and parts.ended:
            name, reason = parts.ended
            done = f"{self.run_dir} is complete at step {state.step}: {name}: {reason}"
            self.tell(caller.words(f"{done}. Leave this Part out to go on, or start anew with --fresh"))
        if key:
            change = "change" if key == "train.stop_when" else "raise"
            done = f"{self.run_dir} is complete at step {state.step}"
            self.tell(caller.words(f"{done}: {change} {key} to go on, or start anew with --fresh"))

    def _tell_why_it_ended(self, parts: JoinedParts) -> None:
        """Say why the training ended before its last step, if it did."""
        state, stopping, stop = self.prepared.state, self.prepared.stopping, self.prepared.stop
        if state.step >= stop:
            return
        if parts.ended:
            name, reason = parts.ended
            self.tell(f"the training ended at step {state.step} of {stop}: {name}: {reason}")
            return
        trained = stopping.earlier_s + self.consensus.elapsed_s
        why = (
            stopping.reason() or f"its time is up after {trained:,.0f} s (train.max_time={stopping.max_time_s:,.0f} s)"
        )
        self.tell(f"the training ended at step {state.step} of {stop}: {why}")

    def _tell_end(self, latest: Mapping[str, float], *, since: int) -> None:
        """Give the writers the last lines of the log.

        Args:
            since: the step from which this start went on.
        """
        state, per_epoch, config = self.prepared.state, self.prepared.plan.steps_per_epoch, self.config
        elapsed_s = max(self.consensus.elapsed_s, 1e-9)
        samples = (state.step - since) / per_epoch * self.prepared.plan.length
        rule = config.train.stop_when
        chosen = (config.checkpoint.keep_best or "").split() or ([rule.mode, rule.metric] if rule else [])
        found = Ending(
            step=state.step,
            epoch=state.step / per_epoch,
            trained_s=self.prepared.stopping.earlier_s + elapsed_s,
            samples_per_s=samples / elapsed_s if samples else None,
            since=since,
            compared=(chosen[0], chosen[1]) if chosen else ("min", "eval/loss"),
            kept=[checkpoint.step for checkpoint in manifest.listed(self.run_dir / "checkpoints")],
            latest=latest,
        )
        for writer in self.writers:
            writer.end(self.last_lines(found))

    def _evaluation_data(self) -> dict[str, EvaluationData]:
        """The evaluation data by name. Empty, and a warning: this kind of task has such data, its source has none."""
        state = self.prepared.state
        limit = self.config.data.eval_limit
        try:
            evaluated = {
                name: run_data.evaluation_data(
                    self.config, task, state.world, micro_batch=self.evaluated_at_once, limit=limit
                )
                for name, task in self.evaluated_tasks.items()
            }
            for name, data in evaluated.items():
                if data.plan.count < data.plan.length:
                    self.tell(run_data.limited(data.plan, name))
            for data in evaluated.values() if state.step == 0 else ():
                for remark in check_data(data.data, state.world):
                    self.tell(remark)
            return evaluated
        except run_data.NoEvaluationData:
            if type(self.task).eval_data is Task.eval_data:
                raise
        text = "warning: nothing is evaluated, because there is no evaluation data: set data.eval, or "
        text += "train.eval_every_epochs=0 if this is meant"
        warnings = self.prepared.warnings
        warnings += [text] if text not in warnings else []
        return {}

    def _check_model(self) -> list[str]:
        """Put the model into training mode, and check that BatchNorm can take the smallest micro-batch.

        Returns:
            notes for the log.
        """
        prepared, state = self.prepared, self.prepared.state
        notes = loop.set_training_mode(state.strategy)
        notes += batch_norm.notes(state.strategy.model, prepared.plan)
        with state.strategy.inference() as forward:
            batch_norm.check_smallest_micro_batch(
                forward, prepared.plan, read=prepared.batches.loader.batch_of, precision=state.precision
            )
        return notes

    def _saver(self) -> Saver:
        return Saver(
            self.run_dir / "checkpoints",
            self.prepared.state.world,
            self.config.checkpoint,
            tell=self.tell,
            in_background=self.config.checkpoint.mode == "async",
            allowed=self.prepared.may_be_infinite,
        )

    def _give_artifacts(self) -> None:
        """Give the files of the trained run to the writers, if the config says so. A collective."""
        if not self.config.log.artifacts:
            return
        retention = self.config.checkpoint
        try:
            checkpoint, _ = choice.choose(self.run_dir / "checkpoints", self.prepared.state.world, retention)
        except CheckpointError as error:
            self.tell(f"warning: no files are given to the writers: {error}")
            return
        paths = [path for path in map(self.run_dir.joinpath, run_directory.DESCRIBING) if path.exists()]
        for writer in self.writers:
            writer.artifacts([*paths, checkpoint.path])

    def _preempted(self, saver: Saver) -> Preempted:
        """Wait for the last checkpoint; the text says how far the run is."""
        state = self.prepared.state
        saver.wait()
        if saver.failures and saver.saved != state.step:
            saver.finish()
        text = f"stopped by {self.flag.name} before the first step"
        if state.step:
            text = f"stopped by {self.flag.name} at step {state.step} of {self.prepared.stop}, saved"
        self.tell(text)
        return Preempted(text)

    # ---- what the loop calls

    def evaluate(self) -> dict[str, float]:
        """Evaluate the averaged weights, or the weights if there are no averages.

        Raises:
            Preempted: a rank was asked to stop.
        """
        state = self.prepared.state
        results: dict[str, float] = {}
        with contextlib.ExitStack() as stack:
            self.consensus.restart()
            stack.callback(self.consensus.restart)
            state.strategy.sync_buffers()
            forward = stack.enter_context(state.strategy.inference())
            stack.enter_context(restored_state(forward, "evaluation"))
            if state.averages is not None:
                stack.enter_context(state.averages.applied())
            for name, evaluated in self.evaluated.items():
                report = evaluation_run.Report(self.evaluated_tasks[name], partial(_write_report, self.writers))
                found = evaluation_run.evaluate(
                    self.evaluated_tasks[name],
                    evaluated,
                    forward,
                    world=state.world,
                    precision=state.precision,
                    name=name,
                    viewers=[report, *self.viewers],
                    step=state.step,
                    tell=self.tell,
                    tick=self._stop_if_asked,
                )
                results |= named_results(name, found)
        for viewer in self.viewers:
            viewer.end(state.step)
        return results

    def _stop_if_asked(self) -> None:
        if self.consensus():
            raise Preempted


def _write_report(writers: Sequence[Writer], name: str, step: int, text: str) -> None:
    for writer in writers:
        writer.details(f"{name}:\n{text}" if name else text)
        writer.text(f"eval/{name}/report" if name else "eval/report", text, step)


def join_parts(
    prepared: PreparedRun,
    built_in: Sequence[BuiltInPart],
    own: Sequence[Part] = (),
    *,
    folder: Path = Path(),
    tell: Callable[[str], None] = lambda text: None,
) -> JoinedParts:
    """The Parts of a training: Lockstep's, then the user's own.

    Args:
        folder: the run directory.
        tell: writes a line for people into the logs.
    """
    state, per_epoch = prepared.state, prepared.plan.steps_per_epoch
    return JoinedParts(
        own,
        state,
        LogWindow(state.world, state.coefficients, per_epoch, state.metrics),
        last_step=prepared.stop,
        steps_per_epoch=per_epoch,
        built_in=built_in,
        folder=folder,
        tell=tell,
    )
