"""What ranks run for `benchmarks/watch.py`: they import it by its name."""

import contextlib
import resource
import statistics
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from lockstep.core import build
from lockstep.watch.part import Watch
from lockstep.watch.updates import Updates

Job = dict[str, Any]


def lying(fault: Job, settings: Job, folder: Path) -> Job:
    """A training in which a rank lies: steps at which the fault struck on this rank, and the error."""
    import lockstep
    from tests import own_tasks
    from tests.watch.faults import faulty

    struck: list[int] = []
    with faulty(**fault, struck=struck):
        try:
            lockstep.Trainer(settings, run_dir=folder, quiet=True).fit(own_tasks.Deep())
        except lockstep.LockstepError as error:
            return {"error": str(error), "struck": struck}
    return {"error": "", "struck": struck}


def right(config: str, folder: str) -> Job:
    """A training in which nobody lies: its error."""
    import lockstep

    with warnings.catch_warnings():  # of compilers; warm ranks turn them into errors
        warnings.simplefilter("ignore")
        try:
            lockstep.Trainer(config, run_dir=folder, quiet=True).fit()
        except Exception as error:  # of any kind: it is told
            return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def timed(task: str, settings: Job, every: int, rounds: int) -> list[tuple[float, float, float, float]]:
    """Processor seconds of this rank for a training without and with the watch, in turns; of a check, and of a step.

    Those of a check are with what a step that is checked takes longer than the others.
    """
    from tests import runs

    made, found = SIZES[task](), []
    for number in range(rounds + 1):
        pair, check, step = {}, 0.0, 0.0
        for watched in ((False, True), (True, False))[number % 2]:
            begun, times = _processor_s(), Times()
            with times if watched else contextlib.nullcontext():
                runs.fit_in_memory(made, settings | ({"watch": {"every": every}} if watched else {}))
            pair[watched] = _processor_s() - begun
            check, step = times.of_check_and_step() if watched else (check, step)
        found.append((pair[False], pair[True], check, step))
    return found[1:]


class Times(contextlib.ExitStack):
    """Inside, the processor times of steps and of checks are noted.

    Left out are the first check of a training, which repeats more, and the last, after which no rows are looked at.
    """

    def __enter__(self) -> "Times":
        self.checks: list[float] = []
        """By check, in all its parts."""
        self.steps: dict[bool, list[float]] = {False: [], True: []}
        self.is_checked, watch = False, self
        parts = [(Watch, "_begin"), (Watch, "_end")]
        parts += [(Updates, "_make_again"), (Updates, "end"), (Updates, "at_rest")]
        for kind, name in parts:
            noted = self._noted(getattr(kind, name), begins=name == "_begin")
            self.enter_context(mock.patch.object(kind, name, noted))
        make = build.train_step

        def step(*arguments: Any, **options: Any) -> Any:
            before, begun = sum(watch.checks), _processor_s()
            result = make(*arguments, **options)
            within = sum(watch.checks) - before  # the check ends within the step
            watch.steps[watch.is_checked].append(_processor_s() - begun - within)
            watch.is_checked = False
            return result

        self.enter_context(mock.patch.object(build, "train_step", step))
        return super().__enter__()

    def _noted(self, call: Any, *, begins: bool) -> Any:
        def noted(*arguments: Any) -> Any:
            begun = _processor_s()
            found = call(*arguments)
            if begins:
                self.checks.append(0.0)
                self.is_checked = True
            if self.checks:
                self.checks[-1] += _processor_s() - begun
            return found

        return noted

    def of_check_and_step(self) -> tuple[float, float]:
        checks = self.checks[1:-1] or self.checks[1:] or self.checks
        usual = statistics.median(self.steps[False])
        longer = statistics.median(self.steps[True]) - usual if self.steps[True] else 0.0
        return statistics.mean(checks) + longer, usual


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _small() -> Any:
    from lockstep_recipes.tasks.toy.options import ToyOptions
    from lockstep_recipes.tasks.toy.task import Toy

    return Toy(ToyOptions(samples=20_000, eval_samples=8, hidden=128, layers=1))


def _large() -> Any:
    from lockstep_recipes.tasks.toy.options import ToyOptions
    from lockstep_recipes.tasks.toy.task import Toy

    return Toy(ToyOptions(samples=20_000, eval_samples=8, hidden=1024, layers=3))


SIZES = {"small": _small, "large": _large}
