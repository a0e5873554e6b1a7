"""Training in memory or with a run directory, in this process or on ranks; and the same training in plain torch."""

import collections
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from lockstep import Trainer
from lockstep.configs import config_file
from lockstep.core.data.order import permute
from lockstep.core.errors import exits_are_failures
from lockstep.core.parallel.sharded_tensor import gather
from lockstep.core.parallel.world import join_world
from lockstep.mesh.layout import laid_out
from lockstep.trainer import assemble
from lockstep.trainer.joining import Recorder


def config(**sections):
    """A config for tests: 20 steps of 24 samples, without TensorBoard and pictures. `sections` are merged into it.

    Drawing takes longer than the few steps of a test. Tests of pictures set `log.pictures`. Operations are not counted,
    because many tests fail at a certain call of the loss, and the count calls it once more; see
    `tests/parts/test_flops.py`.
    """
    base = {
        "batch": {"global": 24},
        "train": {"steps": 20},
        "optim": {"name": "AdamW", "lr": 0.01, "weight_decay": 0.1},
        "log": {"writers": ["text_log", "json_lines"], "every_steps": 5, "pictures": 0, "flops": False},
        "device": "cpu",
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section if isinstance(section, dict) else section
    return base


_folders: collections.Counter = collections.Counter()
"""How many folders were asked for, by the store of the ranks: each call of `run_ranks` has a store of its own."""


@contextlib.contextmanager
def shared_folder():
    """A folder that is the same on all ranks of a `run_ranks`. It is deleted afterwards."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    store = Path(os.environ.get("LOCKSTEP_STORE", "none"))
    _folders[store] += 1
    name = f"{store.parent.name}-{store.name}-{_folders[store]}" if world > 1 else f"lockstep-test-{os.getpid()}"
    folder = Path(tempfile.gettempdir(), name)
    try:
        yield folder
    finally:
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(folder, ignore_errors=True)


def mark(folder):
    """Make a folder a run directory, for tests that put something into it before the run."""
    folder.mkdir(exist_ok=True)
    (folder / "environment.json").write_text('{"lockstep": "1", "torch": "2", "world": 1}')


def fit(task, settings, run_dir=None, allow_change=()):
    """Final weights of the whole model, by name, and the last value of everything logged.

    Args:
        run_dir: where `Trainer` writes. None: the training keeps everything in memory, see `fit_in_memory`.
    """
    if run_dir is None:
        return fit_in_memory(task, settings)
    weights = FinalWeights()
    results = Trainer(settings, run_dir=run_dir, quiet=True, allow_change=allow_change).fit(task, weights)
    return weights.tensors, results


def fit_in_memory(task, settings):
    """What `Trainer.fit` does, without files: no run directory, no checkpoint, no log, and no dry run before step 1."""
    config = config_file.parse(settings, needs_task=False)
    with join_world(config.device, config.parallel.timeout_s) as world, exits_are_failures():
        training = assemble.in_memory(config, task, laid_out(world, config))
        results = training.train()
        training.run.state.strategy.begin_step()
        return whole_weights(training.run.model), results


def whole_weights(model):
    """All tensors of a model by name, gathered from the ranks' shards. A collective."""
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: gather(tensor.detach()).clone() for name, tensor in tensors.items()}


class FinalWeights(Recorder):
    """Keeps the weights that `Trainer.fit` ends with, gathered while the ranks are still together."""

    def __init__(self):
        self.tensors = {}

    def join(self, run):
        self.prepared = run

    def close(self):
        if sys.exc_info()[0] is None:
            self.tensors = whole_weights(self.prepared.model)


def fit_kind(kind, options, settings, run_dir=None):
    """`fit` with a class of `own_tasks` by name. Ranks get their arguments by pickle, which takes no local class."""
    from tests import own_tasks

    return fit(getattr(own_tasks, kind)(**options), settings, run_dir)


def by_hand(task, steps=20, global_batch=24, clip_norm=None, seed=0, optimizer=None, before_step=None, samples=None):
    """Train in plain torch: in one process, the whole global batch at once, by the mean over its units.

    Args:
        before_step: called with the model and the step's number, from 0.
        samples: gives the indices of a step, instead of those of the permutation.

    Returns:
        final weights by name, and the gradient norm of each update before clipping.
    """
    torch.manual_seed(seed)
    model = task.model()
    optimizer = optimizer(model) if optimizer else torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    data = task.train_data()
    length = len(data)
    per_epoch = -(-length // global_batch)
    norms = []
    for step in range(steps):
        if before_step:
            before_step(model, step)
        epoch, within = divmod(step, per_epoch)
        positions = np.arange(within * global_batch, min((within + 1) * global_batch, length))
        indices = torch.from_numpy(permute(positions, length, seed, epoch)) if samples is None else samples(step)
        batch = [tensor[indices] for tensor in data.tensors]
        losses, weights = task.loss(model, task.embed(model, batch)), task.weight(batch)
        if weights is None:
            loss = losses / len(indices)
        elif isinstance(losses, dict):
            if not any(weights.values()):
                continue
            factors = task.coefficients
            loss = sum(factors.get(head, 1.0) * losses[head] / weights[head] for head in losses if weights[head] > 0)
        elif weights == 0:
            continue  # plain torch would divide by zero: without a unit there is no update
        else:
            loss = losses / weights
        if not loss.requires_grad:
            continue
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf"))))
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, norms


def difference(one, other):
    """The largest relative difference of any tensor, in the 2-norm."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).norm() / other[name].double().norm()) for name in one)
