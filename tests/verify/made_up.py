"""A bench whose trials have been made already, as a test says, and what they saw."""

from pathlib import Path

from lockstep import config_file
from lockstep.verify.experiments import Experiments
from lockstep.verify.recorder import Recording
from lockstep.verify.task_probe import TaskProbe
from lockstep.verify.worker_functions import Answer
from tests import runs


class NoWorkers:
    """Workers that nobody may ask."""

    def run(self, world, function, *arguments):
        raise AssertionError(f"{function} with {arguments} was asked for")


def bench(answers=None, nproc=2, steps=12, folder=Path("nowhere"), ranks=None, **sections):
    """answers: by the name of the trial what its ranks answer, as a list; or what rank 0 does."""
    config = config_file.parse(runs.config(**sections), needs_task=False).model_dump(by_alias=True)
    given = {"nature": TaskProbe(epsilon=1e-16)} | (answers or {})
    made = {
        name: [
            one if isinstance(one, Answer) else Answer(one)
            for one in (answer if isinstance(answer, list) else [answer])
        ]
        for name, answer in given.items()
    }
    return Experiments(config, nproc, folder, ranks or NoWorkers(), steps=steps, _answers=made)


def seen(losses=(), **more):
    """What a rank saw of a training with these losses."""
    return Recording(
        entries=[{"step": step + 1, "train/loss": loss, "train/skipped": 0} for step, loss in enumerate(losses)], **more
    )
