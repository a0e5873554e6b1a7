"""Checkpoints for tests: made by hand in this process, and what runs on ranks."""

import shutil
import time
from pathlib import Path
from unittest.mock import patch

import torch

from lockstep import Trainer
from lockstep.core import resume
from lockstep.core.checkpoint import files, store
from lockstep.core.checkpoint.retention import CheckpointConfig
from lockstep.core.checkpoint.saver import Saver
from lockstep.core.held_folder import HeldFolder
from lockstep.core.parallel import faults
from lockstep.core.parallel.sharded_tensor import LocalShard
from lockstep.core.parallel.world import World, join_world
from tests import own_tasks

ALONE = World(0, 1, 0, torch.device("cpu"))


def ignore(*_):
    """For callbacks that a test does not look at."""


def about(step, **more):
    """The least that a manifest says besides its files."""
    return {"step": step, "metrics": {}, **more}


def commit(folder, step, shares=None, values=None, **more):
    """A checkpoint of `shares`, the tensors of each rank."""
    staged = store.staging(folder, step)
    staged.mkdir(parents=True, exist_ok=True)
    manifest, index = stage(staged, step, shares, **more)
    return store.commit(folder, step, manifest, index=index, values=values or {})


def stage(staged, step, shares=None, **more):
    """Write the shares into the directory; manifest and index."""
    manifest, index = about(step, files={}, **more), {}
    for rank, share in enumerate(shares or [{"weight": torch.arange(10.0) + step}, {"bias": torch.ones(3)}]):
        name = files.share_name(rank)
        manifest["files"][name], places = files.write_share(staged / name, whole(share), ignore)
        index |= places
    return manifest, index


def whole(tensors):
    """Replicated tensors as `write_share` takes them."""
    return {name: LocalShard(tensor, 0, tuple(tensor.shape)) for name, tensor in tensors.items()}


def read(checkpoint):
    return dict(files.read(checkpoint.path, checkpoint.index))


def same(one, other):
    """Whether two dicts of tensors hold the same bits, dtypes and shapes."""
    return one.keys() == other.keys() and all(bits(one[name]) == bits(other[name]) for name in one)


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def flip(path, at):
    """Change one bit of the byte `at` of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << (at % 8)
    path.write_bytes(content)


def steps(folder):
    return [one.step for one in store.listed(folder)]


# ---- on ranks


def save_on_ranks(folder, tensors):
    """Saves step 1, then step 2 while rank 1's disk is full, then step 3; what this rank saw."""
    folder, told, seen = Path(folder), [], {}
    with join_world("cpu") as world:
        saver = Saver(folder, world, CheckpointConfig(), tell=told.append)
        for step in (1, 2, 3):
            faults._WANTED = ["1:2:before-share:full"]
            try:
                saver.save(step, tensors, {}, about(step))
                saver.wait()
            finally:
                faults._WANTED = []
            seen[step] = (saver.saved, list(saver.failures), sorted(path.name for path in folder.iterdir()))
            world.all_sum([0.0])  # rank 0 goes on when all have looked
    return {"seen": seen, "told": told, "mine": sorted(saver.buffers)}


def newest_on_ranks(folders):
    """For each folder the step of the newest valid checkpoint and the messages, or the error, on this rank."""
    from lockstep.core.errors import CheckpointError

    answers = []
    with join_world("cpu") as world:
        for folder in folders:
            try:
                found, complaints = store.newest(Path(folder), world)
                answers.append((found.step if found else None, complaints))
            except CheckpointError as error:
                answers.append(str(error))
    return answers


def evaluate_while_pruned(run_dir, settings, place, more=0):
    """The loss of a run's checkpoint, of which the chosen ones are deleted while they are read; see `place`.

    Args:
        place: `before` any file is read; or when the `index` was read.
        more: so many checkpoints are deleted after the newest.
    """
    load, check_fits, deleted = resume.load_trained_weights, resume.checkpoint_state.check_fits, []

    def load_while_pruned(checkpoint, model, world):
        def delete():
            if len(deleted) <= more:
                deleted.append(checkpoint.step)
                world.all_sum([0.0])
                if world.rank == 0:
                    store.remove(checkpoint.path)
                world.all_sum([0.0])

        def check_and_delete(*arguments, **named):
            check_fits(*arguments, **named)
            delete()

        if place == "before":
            delete()
        with patch.object(resume.checkpoint_state, "check_fits", check_and_delete if place == "index" else check_fits):
            load(checkpoint, model, world)

    with patch.object(resume, "load_trained_weights", load_while_pruned):
        loss = Trainer(settings, run_dir=Path(run_dir), quiet=True).evaluate(own_tasks.Classes())["loss"]
    return loss, deleted


def delete_when_finished(folder, slow):
    """Finish a saver on two ranks. The rank that is not slow deletes the folder at once."""
    with join_world("cpu", 60) as world, HeldFolder(folder) as held:
        check = held.check
        if world.rank == slow:
            held.check = lambda: (time.sleep(0.3), check())
        saver = Saver(folder / "checkpoints", world, CheckpointConfig(), tell=print, held=held)
        saver.finish()
        if world.rank != slow:
            shutil.rmtree(folder)
        return "finished"
