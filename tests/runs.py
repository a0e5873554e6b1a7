"""Training through the public interface, in this process or on ranks, and the same training by hand in plain torch."""

import collections
import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

import lockstep.trainer
from lockstep import Trainer
from lockstep.data.order import permute
from lockstep.distributed.sharded_tensor import gather


def config(**sections):
    """A config for tests: 20 steps of 24 samples, no TensorBoard; sections are merged into it."""
    base = {
        "batch": {"global": 24},
        "train": {"steps": 20},
        "optim": {"name": "AdamW", "lr": 0.01, "weight_decay": 0.1},
        "log": {"writers": ["text_log", "json_lines"], "every_steps": 5},
        "device": "cpu",
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section if isinstance(section, dict) else section
    return base


_fits: collections.Counter = collections.Counter()  # by call of `run_ranks`, which each have a store of their own


@contextlib.contextmanager
def shared_folder():
    """A folder that is the same on all ranks of a `run_ranks`, and gone afterwards."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    store = Path(os.environ.get("LOCKSTEP_STORE", "none"))
    _fits[store] += 1
    name = f"{store.parent.name}-{store.name}-{_fits[store]}" if world > 1 else f"lockstep-test-{os.getpid()}"
    folder = Path(tempfile.gettempdir(), name)
    try:
        yield folder
    finally:
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(folder, ignore_errors=True)


def fit(task, settings, run_dir=None, allow_change=()):
    """Final weights, by name, and what `fit` returned."""
    with shared_folder() as folder, whole_weights(task):
        results = Trainer(settings, run_dir=run_dir or folder, quiet=True, allow_change=allow_change).fit(task)
    return task.built, results


@contextlib.contextmanager
def whole_weights(task):
    """Afterwards `task.built`, the model, is its final weights by name: gathered while the ranks are still together."""
    join = lockstep.trainer.join_world

    @contextlib.contextmanager
    def joined(*arguments):
        with join(*arguments) as world:
            yield world
            task.built = {name: gather(tensor.detach()).clone() for name, tensor in task.built.state_dict().items()}

    lockstep.trainer.join_world = joined
    try:
        yield
    finally:
        lockstep.trainer.join_world = join


def fit_kind(kind, options, settings, run_dir=None):
    """`fit` for a task class of `own_tasks` by name: for ranks, which get everything by pickle."""
    from tests import own_tasks

    return fit(getattr(own_tasks, kind)(**options), settings, run_dir)


def by_hand(task, steps=20, global_batch=24, clip_norm=None, seed=0, optimizer=None, before_step=None):
    """Plain torch: one process, the whole global batch at once, mean over its units. Weights and gradient norms."""
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
        indices = torch.from_numpy(permute(positions, length, seed, epoch))
        batch = [tensor[indices] for tensor in data.tensors]
        losses, weights = task.loss(model, batch), task.weight(batch)
        if weights is None:
            loss = losses / len(indices)
        elif isinstance(losses, dict):
            if not any(weights.values()):
                continue
            factors = task.coefficients()
            loss = sum(factors.get(head, 1.0) * losses[head] / weights[head] for head in losses if weights[head] > 0)
        elif weights == 0:
            continue  # plain torch would divide by zero; no unit means no update
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
    """Largest relative difference of any tensor, in the 2-norm."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).norm() / other[name].double().norm()) for name in one)
