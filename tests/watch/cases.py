"""Trainings on ranks of which one lies, and how they end."""

import json
import re

from lockstep import Trainer
from lockstep.core.checkpoint import store
from lockstep.core.errors import LockstepError
from tests import own_tasks, runs
from tests.watch.faults import faulty


def end_of(fault, settings, folder, kind="Deep"):
    """How a training ends on this rank: the text of its error, if there is one."""
    kinds = {"Deep": own_tasks.Deep, "Plain": own_tasks.Plain}
    with faulty(**fault):
        try:
            Trainer(settings, run_dir=folder, quiet=True).fit(kinds[kind]() if isinstance(kind, str) else kind())
        except LockstepError as error:
            return str(error)
    return None


def verdict_of(folder):
    """What the run has written as its verdict."""
    path = folder / "watch/verdict.json"
    return json.loads(path.read_text()) if path.exists() else None


def step_of(text):
    """The step that an error names."""
    return int(re.search(r"step (\d+), watch", text)[1])


def saved(folder):
    """The steps of the checkpoints, and of those that are set aside."""
    aside = sorted(int(path.name.rpartition("-")[2]) for path in (folder / "checkpoints").glob("suspect-*"))
    return sorted(one.step for one in store.listed(folder / "checkpoints")), aside


__all__ = ["end_of", "runs", "saved", "step_of", "verdict_of"]
