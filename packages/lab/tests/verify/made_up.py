"""Experiments whose results a test makes up."""

from pathlib import Path

from lockstep.configs import config_file
from lockstep_lab.verify import worker_functions
from lockstep_lab.verify.experiments import ExperimentRunner
from lockstep_lab.verify.recorder import Recording
from lockstep_lab.verify.task_probe import TaskProbe
from lockstep_lab.verify.worker_functions import Answer
from lockstep_lab.verify.workers import WorkerEnded
from tests import runs


class NoWorkers:
    """Workers that no test may ask."""

    def run(self, world, function, *arguments):
        raise AssertionError(f"{function} with {arguments} was asked for")


class GivenAnswers:
    """Workers that give the same answers whatever they are asked."""

    def __init__(self, answers):
        self.answers = answers

    def run(self, world, function, *arguments):
        return self.answers


class MadeUpExperiments(ExperimentRunner):
    """Experiments of which some have given answers, by name. The workers make the others."""

    answers = None

    def run(self, name, world, function, *arguments):
        if function in (worker_functions.planned_epochs, worker_functions.planned_evaluations):
            return [function(*arguments)]
        if function == worker_functions.planned_draws and "draws" not in self.answers:
            return [None]  # an epoch has each sample once
        if function == worker_functions.epoch_length:
            return [self.data_sizes()[0]]
        workers = self.workers
        try:
            if name in self.answers:
                self.workers = GivenAnswers(self.answers[name])
            return super().run(name, world, function, *arguments)
        finally:
            self.workers = workers


def experiments(answers=None, nproc=2, steps=12, folder=Path("nowhere"), workers=None, **sections):
    """answers: by name of the experiment, a list with the answer of each rank, or the answer of rank 0."""
    config = config_file.parse(runs.config(**sections), needs_task=False).model_dump(by_alias=True)
    made = MadeUpExperiments(config, nproc, folder, workers or NoWorkers(), steps=steps)
    given = {"task-probe": TaskProbe(epsilon=1e-16), "data-sizes": [(240, 0)]}
    given |= {"data-probe": [Answer([])], "preparation": ""} | (answers or {})
    lists = {name: answer if isinstance(answer, list) else [answer] for name, answer in given.items()}
    made.answers = {
        name: [answer if isinstance(answer, Answer | WorkerEnded) else Answer(answer) for answer in answers]
        for name, answers in lists.items()
    }
    learned = lists.get("learned-1", [None])[0]
    made.learning_steps = learned.stop if isinstance(learned, Recording) else made.learning_steps
    return made


def recording(losses=(), **more):
    """What was recorded on a rank of a training with these losses."""
    entries = [{"step": step + 1, "train/loss": loss, "train/skipped": 0} for step, loss in enumerate(losses)]
    return Recording(entries=entries, **more)
