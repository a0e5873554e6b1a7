"""The evaluation of sets of data, with what shows it to people: during a training, and of a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from lockstep.core import evaluate as evaluation
from lockstep.core import task_checks
from lockstep.core.defaults import is_default
from lockstep.core.evaluation_progress import EvaluationProgress
from lockstep.core.parallel.precision import Precision
from lockstep.core.parallel.world import World
from lockstep.core.run_data import EvaluationData
from lockstep.core.worst import WorstSamples

T = TypeVar("T")
_SHOWN = 4  # samples that a report gets


@dataclass(frozen=True)
class Findings:
    """The findings of an evaluation of one set of data, for viewers."""

    evaluated: EvaluationData
    step: int
    """Steps that are done."""
    values: Mapping[str, Any]
    """Computed by the metrics."""
    outputs: Mapping[int, Any]
    """By index; also of samples that other viewers asked for."""
    worst: WorstSamples | None
    """Returned by `Viewer.worst`, with the samples of all ranks."""


class Viewer:
    """Shows to people what evaluations found. This class shows nothing.

    All ranks make viewers and call `samples` and `worst` alike; `show` is called on rank 0.
    """

    def begin(self, step: int, evaluated: EvaluationData | None) -> None:
        """Before the first step of a training, on all ranks.

        Args:
            step: steps that are done.
            evaluated: the first set of evaluation data. None: nothing is evaluated.
        """

    def samples(self, evaluated: EvaluationData) -> Sequence[int]:
        """Indices of samples whose outputs `show` gets."""
        return ()

    def worst(self, evaluated: EvaluationData) -> WorstSamples | None:
        """A collector of the most wrong samples, for one evaluation. None: they are not shown."""
        return None

    def show(self, found: Findings) -> None:
        """Show the evaluation of a set of data."""

    def end(self, step: int) -> None:
        """All sets of data were evaluated after `step` steps. Called on all ranks."""


class PresenterReport(Viewer):
    """The text that the task's presenter gives for an evaluation.

    Args:
        write: takes the name of the evaluation data, the step and the text.
    """

    def __init__(self, write: Callable[[str, int, str], None]) -> None:
        self.write = write

    def samples(self, evaluated: EvaluationData) -> Sequence[int]:
        """The same samples for every number of ranks. Empty if the presenter does not override `report`."""
        return () if is_default(task_checks.presenter(evaluated.task).report) else evaluated.plan.first(_SHOWN)

    def show(self, found: Findings) -> None:
        evaluated, outputs = found.evaluated, found.outputs
        samples = [(evaluated.data[index], outputs[index]) for index in self.samples(evaluated) if index in outputs]
        try:
            has_any = found.values or samples
            text = task_checks.presenter(evaluated.task).report(found.values, samples) if has_any else ""
        except Exception as error:  # what is only shown must not end a training
            text = f"warning: Presenter.report failed: {type(error).__name__}: {error}"
        if text:
            self.write(evaluated.name, found.step, text)


def evaluate(
    sets: Sequence[EvaluationData],
    forward: nn.Module,
    *,
    world: World,
    precision: Precision,
    viewers: Sequence[Viewer] = (),
    step: int = 0,
    tell: Callable[[str], None] = lambda text: None,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Evaluate sets of data one after the other, and show them. All ranks call it.

    Args:
        step: of the training, for viewers.
        tell: takes lines on the progress, and on samples that cannot be read.
        tick: is called after each micro-batch, on all ranks alike.

    Returns:
        results, as `core.evaluate.evaluate`; see `named_results`.
    """

    def results_of(evaluated: EvaluationData) -> dict[str, float]:
        progress = EvaluationProgress(tell, evaluated.plan, world.replicas, evaluated.name)
        wanted = dict.fromkeys(index for viewer in viewers for index in viewer.samples(evaluated))
        worst = next((found for viewer in viewers if (found := viewer.worst(evaluated)) is not None), None)

        def count() -> None:
            progress.tick()
            tick()

        def show(values: dict[str, Any], outputs: list[tuple[int, Any]]) -> None:
            for viewer in viewers:
                viewer.show(Findings(evaluated, step, values, dict(outputs), worst))

        return evaluation.evaluate(
            evaluated.task,
            forward,
            evaluated.loader,
            plan=evaluated.plan,
            world=world,
            precision=precision,
            tick=count,
            tell=tell,
            show=show,
            show_samples=tuple(wanted),
            worst=worst,
        )

    results: dict[str, float] = {}
    for evaluated in sets:
        results |= named_results(evaluated.name, results_of(evaluated))
    for viewer in viewers:
        viewer.end(step)
    return results


def named_results(name: str, results: Mapping[str, T]) -> dict[str, T]:
    """Results with the name of their evaluation data in front: `clean/loss`. The empty name changes nothing."""
    return {f"{name}/{result}" if name else result: value for result, value in results.items()}
