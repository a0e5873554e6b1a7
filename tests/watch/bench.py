"""What ranks run for `benchmarks/watch.py`: they import it by its name."""

import resource
import warnings
from pathlib import Path
from typing import Any

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


def timed(task: str, settings: Job, every: int, rounds: int) -> list[tuple[float, float]]:
    """Processor seconds of this rank for a training without and with the watch, in turns."""
    from tests import runs

    made, found = SIZES[task](), []
    for number in range(rounds + 1):
        pair = {}
        for watched in ((False, True), (True, False))[number % 2]:
            begun = _processor_s()
            runs.fit_in_memory(made, settings | ({"watch": {"every": every}} if watched else {}))
            pair[watched] = _processor_s() - begun
        found.append((pair[False], pair[True]))
    return found[1:]


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _small() -> Any:
    from lockstep.tasks.toy.options import ToyOptions
    from lockstep.tasks.toy.task import Toy

    return Toy(ToyOptions(samples=20_000, eval_samples=8, hidden=128, layers=1))


def _large() -> Any:
    from lockstep.tasks.toy.options import ToyOptions
    from lockstep.tasks.toy.task import Toy

    return Toy(ToyOptions(samples=20_000, eval_samples=8, hidden=1024, layers=3))


SIZES = {"small": _small, "large": _large}
