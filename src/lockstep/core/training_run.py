"""The training of a run: its last checks, the loop, and what the loop calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from lockstep.core import batch_norm, devices, evaluation_run, loop, run_data, run_folder
from lockstep.core.build import Run
from lockstep.core.built_in import BuiltInPart
from lockstep.core.checkpoint import choice
from lockstep.core.checkpoint.saver import Saver
from lockstep.core.data.data_check import check_data
from lockstep.core.data.workers import print_warning
from lockstep.core.errors import CheckpointError, Preempted, number_of
from lockstep.core.evaluation_run import Viewer
from lockstep.core.joined_parts import JoinedParts
from lockstep.core.log_window import LogWindow
from lockstep.core.parallel.buffers import restored_state
from lockstep.core.parallel.stop_consensus import StopConsensus
from lockstep.core.part import Part
from lockstep.core.resume import RunKeeper
from lockstep.core.step import StepResult
from lockstep.core.task import Task
from lockstep.core.writer import tell

# ---- before the first step


def open_evaluations(run: Run, tasks: Mapping[str, Task], micro_batch: int) -> None:
    """Open the evaluation data of a run, if it evaluates.

    Args:
        tasks: for each set of evaluation data, by its name, the task that has it.
        micro_batch: samples of a micro-batch of an evaluation.
    """
    has_data = type(run.task).eval_data is not Task.eval_data
    if not run.intervals.evaluate:
        if has_data:
            run.tell("note: nothing is evaluated; train.eval_every_epochs=1 evaluates after each epoch")
        return
    limit = run.config.data.eval_limit
    try:
        for name, task in tasks.items():
            run.evaluated.append(
                run_data.evaluation_data(run.config, task, run.world, micro_batch=micro_batch, limit=limit, name=name)
            )
    except run_data.NoEvaluationData:
        if not has_data:
            raise
        # This kind of task has such data, and its source has none.
        text = "warning: nothing is evaluated, because there is no evaluation data: set data.eval, or "
        text += "train.eval_every_epochs=0 if this is intended"
        run.warnings += [text] if text not in run.warnings else []
        run.evaluated, run.intervals = [], replace(run.intervals, evaluate=0)
    for evaluated in run.evaluated:
        for line in evaluated.limit():
            run.tell(line)
    for evaluated in run.evaluated if run.state.step == 0 else ():
        for line in check_data(evaluated.data, run.world):
            run.tell(line)


def join_parts(run: Run, built_in: Sequence[BuiltInPart], own: Sequence[Part] = ()) -> JoinedParts:
    """The Parts of a training: Lockstep's, then the user's own."""
    state, per_epoch = run.state, run.plan.steps_per_epoch
    return JoinedParts(
        own,
        state,
        LogWindow(state.world, state.coefficients, per_epoch, state.metrics),
        last_step=run.stop,
        steps_per_epoch=per_epoch,
        built_in=built_in,
        folder=run.folder,
        tell=run.tell,
    )


def check(
    run: Run, parts: JoinedParts, viewers: Sequence[Viewer] = (), *, more: Callable[[], list[str]] = list
) -> None:
    """Make all checks that are possible before the first step, and draw what people look at before a run.

    The Parts get the states that the checkpoint has of them.

    Args:
        more: makes more checks, when the state is complete, and returns lines for the log.
    """
    state = run.state
    state.world.heartbeat.step = state.step  # this process may have trained before
    if state.averages is not None:
        run.tell(
            "evaluations and exports use the averages of the weights "
            f"(train.ema_decay={state.averages.decay:g}), not the weights"
        )
    if state.world.rank == 0:
        _let_loaders(run, partial(tell, run.writers))
    note = devices.of(state.world.device).note()
    notes = [note] if note else []
    notes += parts.restore(run.saved_parts) if state.step else []
    parts.window.restore(run.saved_log)
    notes += _check_model(run)
    notes += more()
    for text in [*notes, *run.warnings]:
        run.tell(text)
    for viewer in viewers:
        viewer.begin(state.step, next(iter(run.evaluated), None))


def _let_loaders(run: Run, show: Callable[[str], None]) -> None:
    """Let the loaders of a run show their warnings by `show`."""
    for loader in (run.batches.loader, *(evaluated.loader for evaluated in run.evaluated)):
        loader.tell = show


def _check_model(run: Run) -> list[str]:
    """Put the model into training mode, and check that BatchNorm can take the smallest micro-batch.

    Returns:
        notes for the log.
    """
    state = run.state
    notes = loop.set_training_mode(state.strategy)
    notes += batch_norm.notes(run.model, run.plan)
    with state.strategy.inference() as forward:
        batch_norm.check_smallest_micro_batch(
            forward, run.plan, read=run.batches.loader.batch_of, precision=state.precision
        )
    return notes


# ---- from the first step to the last checkpoint


def steps(
    run: Run, *, parts: JoinedParts, viewers: Sequence[Viewer], consensus: StopConsensus
) -> Generator[loop.NextStep, StepResult, dict[str, float]]:
    """Train a run that was checked: yields each step that is to be made, and is sent its result; see `loop.steps`.

    Args:
        consensus: says on all ranks alike whether a rank was asked to stop. Its clock begins with the training.

    Returns:
        the last value of everything logged.

    Raises:
        Preempted: a rank was asked to stop. The state is saved.
        TrainingError: see `loop.steps`.
    """
    saver = _saver(run)
    consensus.wants_end = parts.wants_end
    consensus.flag.saves = True
    try:
        _tell_if_complete(run, parts)
        latest = yield from loop.steps(
            run.state,
            run.batches,
            plan=run.plan,
            stop=run.stop,
            intervals=run.intervals,
            parts=parts,
            consensus=consensus,
            evaluate=partial(_evaluate, run, viewers, consensus),
            keeper=None if run.held is None else RunKeeper(run, saver, parts, consensus),
            writers=run.writers,
            evaluated=run.results,
            stopping=run.stopping,
        )
        saver.finish()
        _give_artifacts(run)
        _tell_why_it_ended(run, parts, consensus.elapsed_s)
        loop.check_any_update(run.state)
    except Preempted:
        raise _preempted(run, saver, consensus.flag.name) from None
    except loop.LeftLoop:
        saver.finish()
        run.tell(f"the training ended at step {run.state.step} of {run.stop}: the script left its loop")
        raise
    finally:
        saver.close()
        _let_loaders(run, print_warning)  # a recorder among the writers may hold the loader: no cycles
    return latest


def _saver(run: Run) -> Saver:
    retention = run.config.checkpoint
    return Saver(
        run.folder / "checkpoints",
        run.world,
        retention,
        tell=run.tell,
        in_background=retention.mode == "async",
        allowed=run.may_be_infinite,
        held=run.held,
    )


def _evaluate(run: Run, viewers: Sequence[Viewer], consensus: StopConsensus) -> dict[str, float]:
    """Evaluate the averaged weights, or the weights if there are no averages.

    Raises:
        Preempted: a rank was asked to stop.
    """

    def stop_if_asked() -> None:
        if consensus():
            raise Preempted

    def write(name: str, step: int, text: str) -> None:
        for writer in run.writers:
            writer.details(f"{name}:\n{text}" if name else text)
            writer.text(f"eval/{name}/report" if name else "eval/report", text, step)

    state = run.state
    with contextlib.ExitStack() as stack:
        consensus.restart()
        stack.callback(consensus.restart)
        state.strategy.begin_step()
        forward = stack.enter_context(state.strategy.inference())
        stack.enter_context(restored_state(forward, "evaluation"))
        if state.averages is not None:
            stack.enter_context(state.averages.applied())
        return evaluation_run.evaluate(
            run.evaluated,
            forward,
            world=state.world,
            precision=state.precision,
            viewers=[evaluation_run.PresenterReport(write), *viewers],
            step=state.step,
            tell=run.tell,
            tick=stop_if_asked,
        )


# ---- what is said about the end


def _tell_if_complete(run: Run, parts: JoinedParts) -> None:
    key = "train.steps" if run.config.train.steps else "train.epochs"
    if run.state.step < run.stop:
        key = "train.stop_when" if run.stopping.reason() else "train.max_time" if run.stopping.time_is_up(0.0) else ""
    done = f"{run.folder} is complete at step {run.state.step}: "
    if run.state.step > run.stop:
        done = f"{run.folder} is at step {run.state.step}, and {key} asks for {number_of(run.stop, 'step')}: "
    if not key and parts.ended:
        name, reason = parts.ended
        done += f"{name}: {reason}. Leave this Part out to continue"
    elif key:
        done += f"{'change' if key == 'train.stop_when' else 'raise'} {key} to continue"
    else:
        return
    run.tell(f"{done}, or start again with --fresh")


def _tell_why_it_ended(run: Run, parts: JoinedParts, elapsed_s: float) -> None:
    """Say why the training ended before its last step, if it did."""
    step, stopping = run.state.step, run.stopping
    if step >= run.stop:
        return
    if parts.ended:
        why = ": ".join(parts.ended)
    else:
        taken_s = stopping.earlier_s + elapsed_s
        why = stopping.reason()
        why = why or f"its time is up after {taken_s:,.0f} s (train.max_time={stopping.max_time_s:,.0f} s)"
    run.tell(f"the training ended at step {step} of {run.stop}: {why}")


def _give_artifacts(run: Run) -> None:
    """Give the files of the trained run to the writers, if the config says so. A collective."""
    if not run.config.log.artifacts:
        return
    try:
        checkpoint, _ = choice.choose(run.folder / "checkpoints", run.world, run.config.checkpoint)
    except CheckpointError as error:
        run.tell(f"warning: no files are given to the writers: {error}")
        return
    paths = [path for path in map(run.folder.joinpath, run_folder.DESCRIBING) if path.exists()]
    for writer in run.writers:
        writer.artifacts([*paths, checkpoint.path])


def _preempted(run: Run, saver: Saver, signal: str) -> Preempted:
    """Wait for the last checkpoint; the text says how far the run is."""
    step = run.state.step
    saver.wait()
    if saver.failures and saver.saved != step:
        saver.finish()
    text = f"stopped by {signal} before the first step"
    if step:
        text = f"stopped by {signal} at step {step} of {run.stop}, saved"
    run.tell(text)
    stopped = Preempted(text)
    stopped.is_in_log = True
    return stopped
