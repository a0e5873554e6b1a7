"""Memory that does not suffice on one of three ranks, where the forward pass of the model has a collective.

The other ranks wait for this rank in the collective. The ranks compute on the device in Python, each on its own.
"""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.core.errors import LockstepError
from lockstep.core.parallel import failure
from lockstep.core.parallel import world as worlds
from lockstep.parts import flops
from tests import own_tasks, rank_cases, runs
from tests.python_device import NAME
from tests.ranks import run_on_python_devices
from tests.selection import mainly

RANKS, WITHOUT_MEMORY = 3, 1


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all ranks. Its gradient is summed over all ranks, too."""

    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total


class NormOverRanks(nn.Module):
    """Normalises by the mean and the mean square of all ranks' samples, as SyncBatchNorm does: torch's own has kernels
    for CUDA only."""

    def forward(self, inputs):
        if not self.training:
            return inputs
        sums = _Sum.apply(torch.cat([inputs.sum(0), inputs.square().sum(0), inputs.new_full((1,), len(inputs))]))
        mean, square = (sums[: inputs.shape[1]] / sums[-1], sums[inputs.shape[1] : -1] / sums[-1])
        return (inputs - mean) * (square - mean.square() + 1e-5).rsqrt()


class Normed(own_tasks.Plain):
    """A collective in each forward pass of training. In one pass, rank 1 has no free memory.

    Args:
        place: the pass, see `PLACES`. None: there is always memory.
        device: that of the rank.
    """

    def __init__(self, place, device):
        super().__init__(eval_length=24)
        self.place, self.device, self.passes, self.counts = place, device, 0, False

    def model(self):
        return nn.Sequential(nn.Linear(10, 16), NormOverRanks(), nn.Tanh(), nn.Linear(16, 5)).double()

    def loss(self, model, batch):
        trains = model.training and torch.is_grad_enabled()
        now = "trial"
        if trains:
            self.passes += 1
            now = "count" if self.counts else self.passes
        if self.place == now and os.environ["RANK"] == str(WITHOUT_MEMORY):
            self.device.limit = self.device.bytes  # the next tensor does not fit
        try:
            return super().loss(model, batch)
        finally:
            self.device.limit = None


PLACES = {"the trial": "trial", "the first step": 1, "a later step": 12, "the count of operations": "count"}
"""The pass in which memory is short: of a training, counted from 1; or before the first step, or beside the steps."""


def fit(device, place, folder):
    """Final weights of a training on this rank; or the error's class, its text, and whether a new start may help.

    Memory is short at `place`, unless an earlier start has noted a smaller micro-batch.
    """
    worlds.pick_device = lambda *_, **__: torch.device(NAME, 0)
    enter, leave = flops.FlopCounterMode.__enter__, flops.FlopCounterMode.__exit__
    task = Normed(None if Path(folder, "micro.json").exists() else PLACES[place], device)
    settings = runs.config(
        device="auto",
        batch={"global": 24, "micro": 4},
        train={"steps": 10, "eval_every_steps": 10},
        checkpoint={"every_steps": 2, "mode": "sync"},
        log={"every_steps": 4, "flops": True},
        parallel={"timeout_s": 600},
    )
    with rank_cases.impatient(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure, "_GRACE_S", 2.0)
        patch.setattr(flops.FlopCounterMode, "__enter__", lambda mode: setattr(task, "counts", True) or enter(mode))
        patch.setattr(
            flops.FlopCounterMode,
            "__exit__",
            lambda mode, *error: setattr(task, "counts", False) or leave(mode, *error),
        )
        try:
            return {name: tensor.cpu() for name, tensor in runs.fit(task, settings, Path(folder))[0].items()}
        except LockstepError as error:
            return type(error).__name__, str(error), error.retryable


@pytest.mark.parametrize("place", mainly([], PLACES))
def test_a_shortage_on_one_of_three_ranks_ends_all_and_the_next_start_halves(place, tmp_path):
    arguments = (fit, place, str(tmp_path / "run"))
    ends = run_on_python_devices(RANKS, *arguments, may_end=True)
    name, text, retryable = ends.pop(WITHOUT_MEMORY)
    assert name == "MemoryShortage"
    assert f"rank {WITHOUT_MEMORY}: out of memory" in text
    assert f"with micro-batches of 4: {NAME}: out of memory. Tried to allocate" in text
    assert retryable
    for end in ends:  # the collective may hold the rank. Then its process ends, as with NCCL
        assert end[0] == "RankError" if isinstance(end, tuple) else str(end).endswith("ended with exit code 1"), end
    note = json.loads((tmp_path / "run" / "micro.json").read_text())
    assert note["evaluation" if place == "the trial" else "micro"] == 2
    found = run_on_python_devices(RANKS, *arguments)
    assert [type(one) for one in found] == [dict] * RANKS, found
    for weights in found[1:]:
        assert all(torch.equal(weights[name], tensor) for name, tensor in found[0].items())
