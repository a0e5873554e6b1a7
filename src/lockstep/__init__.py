"""Lockstep: distributed PyTorch training whose result does not depend on how it was run.

Trainer: trains, evaluates, predicts and exports as a config says.
Task: what a user writes: model, data, loss, metrics.
Loop: a training loop that you write yourself, with the promises of a Trainer.
Metrics: what `Task.metrics` may return, for batches that are not (input, target) pairs.
AlternatingTask: a task whose players, such as a generator and a discriminator, update in turn.
Player: parameters with their own loss.
Follower: parameters that follow other parameters as a moving average.
Part: code that runs at events of the training: your own messages, logged figures, or a rule to stop.
Writer: receives the entries of the log; the base class for your writers.
WeightedSampler: draws the samples of a data set with replacement, by weights.
TaskOptions: the base class for the options of a task from a different distribution.
Presenter: shows samples, outputs and results of a task to people.
RunConfig: the whole config of a run.
Stream: an iterable of samples as training data, for any number of ranks.
losses: Dice for each sample, and over the global batch.
trained_only: leaves the frozen weights of a model out of checkpoints, such as those next to adapters of peft.
LockstepError: the base class of all errors. Each says what is wrong, where, and what to do.

`lockstep init FILE.py` on the command line writes a first task.
"""

from __future__ import annotations

import importlib
import os
import sys

TYPE_CHECKING = False  # typing's own would take as long to import as Python to start
__version__ = "0.1.0"
__all__ = [
    "AlternatingTask",
    "Follower",
    "LockstepError",
    "Loop",
    "Metrics",
    "Part",
    "Player",
    "Presenter",
    "RunConfig",
    "Stream",
    "Task",
    "TaskOptions",
    "Trainer",
    "WeightedSampler",
    "Writer",
    "trained_only",
]

if TYPE_CHECKING:
    from lockstep import losses as losses
    from lockstep.configs.task_options import TaskOptions
    from lockstep.core.config.sections import RunConfig
    from lockstep.core.errors import LockstepError
    from lockstep.core.part import Part
    from lockstep.core.presenter import Presenter
    from lockstep.core.task import Metrics, Task
    from lockstep.core.writer import Writer
    from lockstep.lora.frozen import trained_only
    from lockstep.sampling.weighted import WeightedSampler
    from lockstep.streams.stream import Stream
    from lockstep.trainer.trainer import Trainer
    from lockstep.trainer.user_loop import Loop
    from lockstep.updates.players import AlternatingTask, Follower, Player

_HOMES = {
    "AlternatingTask": "updates.players",
    "Follower": "updates.players",
    "LockstepError": "core.errors",
    "Loop": "trainer.user_loop",
    "Metrics": "core.task",
    "Part": "core.part",
    "Player": "updates.players",
    "Presenter": "core.presenter",
    "RunConfig": "core.config.sections",
    "Stream": "streams.stream",
    "Task": "core.task",
    "TaskOptions": "configs.task_options",
    "Trainer": "trainer.trainer",
    "WeightedSampler": "sampling.weighted",
    "Writer": "core.writer",
    "trained_only": "lora.frozen",
}


# Threads of OpenMP wait by spinning. If other processes want their cores, an operation then takes 10 to 20 times as
# long as with one thread. The libraries read these variables when torch is imported.
_WAITS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
if "torch" not in sys.modules and not any(name in os.environ for name in _WAITS):
    os.environ.update(_WAITS)
if sys.platform == "darwin" and "torch" not in sys.modules:  # torch reads this when it is imported
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "__doc__"]


def __getattr__(name: str) -> object:
    # Importing torch takes seconds; `import lockstep` and `lockstep --help` must not wait for it.
    if name == "losses":
        return importlib.import_module("lockstep.losses")
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lockstep.{_HOMES[name]}"), name)
