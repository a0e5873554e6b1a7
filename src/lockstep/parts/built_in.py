"""Lockstep's own Parts and viewers of a training, as configured."""

from __future__ import annotations

from functools import partial

from lockstep.core import run_folder, task_checks
from lockstep.core.build import Run
from lockstep.core.built_in import BuiltInPart
from lockstep.core.data.order import StepPlan
from lockstep.core.evaluation_run import Viewer
from lockstep.core.task import Task
from lockstep.parts.epoch_lines import EpochLines
from lockstep.parts.evaluation_arrays import ArraysOfEvaluations
from lockstep.parts.figures import Memory, Operations, RankTimes
from lockstep.parts.metric_arrays import MetricArrays
from lockstep.parts.probe import Probe
from lockstep.parts.run_pictures import RunPictures
from lockstep.parts.write_guard import WriteGuard


def parts(run: Run) -> list[BuiltInPart]:
    """The Parts, in the order in which they are called."""
    config, state, plan, log = run.config, run.state, run.plan, run.config.log
    compiled, loader = config.compute.compile is not None, run.batches.loader
    found: list[BuiltInPart] = [Operations(compiled=compiled, loader=loader)] if log.flops else []
    found.append(Memory(evaluates=run.intervals.evaluate > 0, shows_tables=log.memory == "table"))
    if state.world.size > 1:
        found.append(RankTimes())
    has_lines = config.train.steps is None
    if has_lines or state.unfreezing is not None:
        found.append(EpochLines(plan, run.intervals, partial(_epoch_header, run.task, plan), has_lines=has_lines))
    return [*found, *([Probe(log.probe_every_epochs)] if log.probe_every_epochs else [])]


def viewers(run: Run) -> list[Viewer]:
    """The viewers that show evaluations to people, in addition to the task's report."""
    arrays = WriteGuard(run_folder.METRIC_ARRAYS, partial(MetricArrays, run.folder, run.tell), run.tell)
    return [ArraysOfEvaluations(arrays), RunPictures(run)]


def _epoch_header(task: Task, plan: StepPlan, epoch: int) -> str:
    """What the order of the samples and the task's presenter say about an epoch, counted from 0."""
    try:
        words = getattr(plan.order, "words", None)
        texts = [words(plan.seed, epoch) if words else "", task_checks.presenter(task).epoch_header(epoch)]
        return ", ".join(filter(None, texts))
    except Exception as error:  # a display must not end a training
        return f"warning: Presenter.epoch_header failed: {type(error).__name__}: {error}"
