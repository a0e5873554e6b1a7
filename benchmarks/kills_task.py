"""The digits recipe, keeping a ledger: which samples each optimizer step used. For `kills.py`."""

import os

from lockstep.core import loop
from lockstep.tasks.vision.classification.options import ClassificationOptions
from lockstep.tasks.vision.classification.task import Classification

_step = loop.train_step


def _noting(run, micros, samples, want_norm=False):
    outcome = _step(run, micros, samples, want_norm=want_norm)
    used = sorted(index for micro in micros if not micro.filler for index in micro.indices)
    with open(os.environ["LEDGER"], "a") as file:  # one write: lines of several processes do not mix
        file.write(f"{outcome.step} {run.world.rank} {os.getpid()} {','.join(map(str, used))}\n")
    return outcome


loop.train_step = _noting


class Digits(Classification):
    """Numbers as in recipes/digits.yaml."""

    def __init__(self, train="digits", eval="digits", width=32):
        augment = {"crop": "shift", "shift": 1, "flip": 0, "fill": 0}
        options = {"channels": 1, "scratch": {"sizes": {"width": width}}, "augment": augment}
        super().__init__(ClassificationOptions.model_validate(options), train, eval)
