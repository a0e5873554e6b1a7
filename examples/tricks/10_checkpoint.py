"""A checkpoint is complete or absent, and contains all that the next step needs.

    torchrun --nproc-per-node 2 examples/tricks/10_checkpoint.py
    ... --wrong in_place    # writes over the old file
    ... --wrong optimizer   # keeps only the weights

A run saves every 10 steps. The power fails in the middle of the second save. Then the run is restarted.
"""

import io
import os
import tempfile
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from toy import digits, flat, make_model, mistake, place, say, shuffled, start

STEPS, EVERY, BATCH = 30, 10, 64

wrong = mistake("in_place", "optimizer")
rank, world = start()
images, labels = digits()


class PowerFailure(Exception):
    pass


def save(path, state, fails):
    """Write a state. If it `fails`, only half of the bytes are on disk."""
    content = io.BytesIO()
    torch.save(state, content)
    target = path if wrong == "in_place" else path.with_suffix(".staged")
    with open(target, "wb") as file:
        file.write(content.getvalue()[: len(content.getvalue()) // (2 if fails else 1)])
        file.flush()
        os.fsync(file.fileno())  # the bytes are on disk before the name is
    if fails:
        raise PowerFailure
    os.replace(target, path)  # at any instant, the old or the new file exists


def load(path):
    """The newest readable state, or None."""
    try:
        return torch.load(path, map_location=place())  # not onto the GPU of the rank that saved
    except (OSError, RuntimeError, EOFError, UnpicklingError):  # missing, or incomplete: torch has three errors
        return None


def train(path=None, failing=None):
    """The weights after all steps, and the step at which the training started."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = load(path) if path else None  # every rank reads the file
    begin = state["step"] if state else 0
    if state:
        model.module.load_state_dict(state["model"])
        if wrong != "optimizer":
            optimizer.load_state_dict(state["optimizer"])
    for step in range(begin, STEPS):
        epoch, place = divmod(step, len(labels) // BATCH)  # the order is a function of the step, so it is not saved
        batch = shuffled(len(labels), epoch)[place * BATCH : (place + 1) * BATCH]
        mine = batch[rank::world]
        optimizer.zero_grad()
        (cross_entropy(model(images[mine]), labels[mine], reduction="sum") * world / len(batch)).backward()
        optimizer.step()
        if path and (step + 1) % EVERY == 0:
            state = {"step": step + 1, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            if rank == 0:
                save(path, state, fails=step + 1 == failing)
            elif step + 1 == failing:
                raise PowerFailure
            dist.barrier()  # all ranks, outside the `if`: no rank continues before the file exists
    return flat(model.parameters()), begin


folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
path = Path(folder[0], "checkpoint.pt")
undisturbed, _ = train()
try:
    train(path, failing=2 * EVERY)
except PowerFailure:
    dist.barrier()
resumed, begin = train(path)
say(f"the power failed after step {2 * EVERY}; the second start began at step {begin}")
say(f"largest difference from the weights of an undisturbed run: {(resumed - undisturbed).abs().max().item():.3g}")
