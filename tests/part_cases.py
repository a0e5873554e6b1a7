"""Parts for tests, and what tests run on ranks."""

import copy
import os
import signal
import sys
from pathlib import Path

import torch

from lockstep import LockstepError, Part, Trainer
from lockstep.core.built_in import Inside
from lockstep.core.part import EVENTS
from tests import own_tasks, runs


class Leaving(Part):
    """Ends the process of a rank after step 7, as its author believes."""

    def __init__(self, rank, required=True):
        self.rank, self.required = rank, required

    def after_step(self, training):
        if training.step == 7 and training.rank == self.rank:
            sys.exit(3)


class Recording(Part):
    """Keeps each event with its step."""

    def __init__(self):
        self.seen = []


def _recorder(event):
    return lambda self, training: self.seen.append((event, training.step))


for _event in EVENTS:
    setattr(Recording, _event, _recorder(_event))


class Counting(Part):
    """Has a state of numbers, texts and tensors that depends on every step; kills a rank after a step."""

    def __init__(self, kill=None):
        self.kill = kill  # rank and step
        self.steps, self.losses = [], {"of": (), "best": float("inf")}
        self.total = [0.0] * 3  # as a tensor, it would come to all ranks as the same memory
        self.loaded = None

    def start(self, training):
        self.total = torch.as_tensor(self.total, dtype=torch.float64)

    def before_update(self, training):
        self.total += torch.tensor([1.0, training.step, training.step**0.5], dtype=torch.float64)

    def after_step(self, training):
        self.steps.append(training.step)
        if self.kill == (training.rank, training.step):
            os.kill(os.getpid(), signal.SIGKILL)

    def log_entry(self, training):
        training.log("counting/total", self.total.sum())

    def after_evaluation(self, training):
        self.losses["of"] += (training.results["eval/loss"],)
        self.losses["best"] = min(self.losses["of"])

    def state_dict(self):
        return {"steps": self.steps, "losses": self.losses, "total": self.total, "none": None, "bytes": b"\0\1"}

    def load_state_dict(self, state):
        self.loaded = copy.deepcopy(state)
        self.steps, self.losses, self.total = state["steps"], state["losses"], state["total"]


class Norms(Part):
    """Keeps the norm of the whole gradient of each update."""

    def __init__(self):
        self.norms = []

    def before_update(self, training):
        squares = [float(sum(gradient.square().sum() for gradient in training.gradients().values()))]
        self.norms.append((training.all_sum(squares)[0] if training.is_sharded else squares[0]) ** 0.5)


class Asking(Part):
    """Asks for the end on one rank, in an event of a step."""

    def __init__(self, rank=0, event="log_entry", step=10):
        self.rank, self.event, self.step = rank, event, step

    def _ask(self, training, event):
        if (training.rank, event) == (self.rank, self.event) and training.step >= self.step:
            training.request_stop(f"rank {training.rank} asked at step {self.step}")

    def after_step(self, training):
        self._ask(training, "after_step")

    def log_entry(self, training):
        self._ask(training, "log_entry")

    def after_evaluation(self, training):
        self._ask(training, "after_evaluation")


class Failing(Part):
    """Fails on one rank, in the event after a step."""

    def __init__(self, rank=0, step=7, required=True):
        self.rank, self.step, self.required = rank, step, required
        self.calls = 0

    def after_step(self, training):
        self.calls += 1
        if (training.rank, training.step) == (self.rank, self.step):
            raise KeyError("a reason")


class Stateful(Failing):
    """Fails on one rank, and has a state; without a failure, the state may differ by rank."""

    def __init__(self, differs=False, **options):
        super().__init__(required=False, **options)
        self.differs = differs

    def state_dict(self):
        rank = int(os.environ.get("RANK", 0))
        return {"steps": rank if self.differs else 0}

    def load_state_dict(self, state):
        pass


class Vector(Part):
    """Logs something else than a number."""

    required = False

    def after_step(self, training):
        training.log("own/vector", torch.zeros(2))


class Alone(Failing):
    """Communicates although it may fail alone."""

    name = "alone"

    def after_step(self, training):
        training.gather(1)


class Uneven(Part):
    """Each rank has another state."""

    def start(self, training):
        self.rank = training.rank

    def state_dict(self):
        return {"rank": self.rank}


def fit(folder, parts, settings=None, **options):
    """Train on this rank. Returns the final weights, the results, and the attributes of the Parts."""
    settings = settings or runs.config(checkpoint={"every_steps": 5, "mode": "sync"}, train={"eval_every_steps": 5})
    weights = runs.FinalWeights()
    trainer = Trainer(settings, run_dir=folder, quiet=True, parts=parts, **options)
    results = trainer.fit(own_tasks.Plain(eval_length=30), weights)
    return weights.tensors, results, [vars(part) for part in parts]


def error_of(folder, parts, settings=None):
    try:
        fit(folder, parts, settings)
    except LockstepError as error:
        (folder / f"error of rank {os.environ.get('RANK', 0)}").write_text(str(error))
        return str(error)
    return None


def inside(state, model):
    """What a Part of Lockstep's own sees of a training that a test has made up."""
    return Inside(
        model=model,
        optimizer=state.optimizer,
        rank=0,
        ranks=2,
        is_sharded=False,
        last_step=9,
        steps_per_epoch=10,
        folder=Path(),
        results={},
        state=state,
        window=None,
    )
