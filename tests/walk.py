"""The walk of one batch: every function of the package that a training step of `digits` calls, with clipping.

`python -m tests.walk` prints the walk of rank 0 of two ranks.
"""

import sys
import tempfile
from pathlib import Path

import lockstep
import lockstep_recipes
from tests import runs

PACKAGES = [Path(package.__file__).parent for package in (lockstep, lockstep_recipes)]
AUGMENT = {"crop": "shift", "shift": 1, "flip": 0, "fill": 0}  # as in recipes/digits.yaml
STEP = 6  # the step that is traced, counted from 1: neither the first step nor a step that logs


def _name(frame):
    """The file of a frame below its package. None: it is of another library."""
    path = Path(frame.f_code.co_filename)
    return next((str(path.relative_to(folder)) for folder in PACKAGES if path.is_relative_to(folder)), None)


def walk(run_dir):
    """[(frames of the package below the loop, file, function)] of each call, from asking for the batch to the update.

    Of rank 0. Files and functions of the shipped task count like all others.
    """
    from lockstep import Trainer
    from lockstep.core import build, loop

    calls, steps, started = [], [0], []
    original = build.train_step
    the_loop = {loop.steps.__code__, loop.NextStep.made_by.__code__}  # what it asks for, and who makes it

    def profile(frame, event, _):
        if event != "call" or _name(frame) is None:
            return
        depth, outer = 0, frame
        while outer is not None and outer.f_code not in the_loop:
            depth += _name(outer) is not None
            outer = outer.f_back
        if frame.f_code.co_qualname == "_steps":
            started.append(True)
        if started and outer is not None:
            calls.append((depth, _name(frame), frame.f_code.co_qualname))

    def traced(state, *arguments, **options):
        steps[0] += 1
        if steps[0] == STEP:
            handle = state.optimizer.register_step_pre_hook(lambda *_: sys.setprofile(None))
            result = original(state, *arguments, **options)
            handle.remove()
            return result
        result = original(state, *arguments, **options)
        if steps[0] == STEP - 1:
            sys.setprofile(profile)
        return result

    build.train_step = traced
    try:
        settings = runs.config(
            task={"kind": "classification", "channels": 1, "augment": AUGMENT},
            data={"train": "digits", "eval": "digits"},
            batch={"global": 64},
            optim={"clip_norm": 1.0},
            train={"steps": 20},
            log={"every_steps": 20},
        )
        Trainer(settings, run_dir=run_dir, quiet=True).fit()
    finally:
        sys.setprofile(None)
        build.train_step = original
    return [(0, "core/loop.py", "steps"), *calls]


if __name__ == "__main__":
    from tests import ranks
    from tests import walk as imported  # ranks cannot import a function of __main__

    with tempfile.TemporaryDirectory() as folder:
        found = ranks.run_ranks(2, imported.walk, folder)[0]
    ranks.close()
    for number, (depth, file, function) in enumerate(found):
        if found[number] not in found[:number]:  # each function once at each depth
            print(f"{'  ' * depth}{function}  {file}")
