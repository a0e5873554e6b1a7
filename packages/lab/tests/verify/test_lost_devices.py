"""Verify where ranks compute on GPUs: batches travel through the host, and a rank that lost its GPU is replaced."""

import contextlib
import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.core import devices
from lockstep.core.parallel import world
from lockstep.parts.replicas import losses_of_one_batch
from lockstep_lab.verify.worker_functions import answering
from lockstep_lab.verify.workers import Workers
from tests.python_device import NAME
from tests.ranks import run_on_python_device


def travel(device):
    """What arrives on another rank of objects with tensors on a device."""
    here = torch.device(NAME, 0)
    given = {"images": torch.arange(6.0).to(here), "others": SimpleNamespace(mask=torch.ones(2, device=here)), "n": 3}
    given["weight"] = nn.Parameter(torch.ones(1, device=here))
    arrived = pickle.loads(world._packed(given).numpy().data)
    tensors = (arrived["images"], arrived["others"].mask, arrived["weight"])
    kinds = [tensor.device.type for tensor in tensors]
    return kinds, arrived["images"].tolist(), arrived["weight"].requires_grad, arrived["n"]


def test_tensors_of_a_device_travel_as_tensors_of_the_host():
    assert run_on_python_device(travel) == (["cpu"] * 3, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], True, 3)


def probe(device, rank):
    """Where the batch of another rank lies when a rank probes the model with it."""
    here, seen = torch.device(NAME, 0), []

    class Forward(nn.Module):
        private = ()

        def forward(self, batch):
            seen.append(batch["x"].device.type)
            return {"loss": batch["x"].sum()}

    batch = {"x": torch.ones(3, device=here)}
    ranks = SimpleNamespace(
        rank=rank,
        device=here,
        broadcast=lambda value: value if rank == 0 else pickle.loads(world._packed(value).numpy().data),
        gather=lambda value: [value],
    )
    strategy = SimpleNamespace(begin_step=lambda: None, inference=lambda: contextlib.nullcontext(Forward()))
    precision = SimpleNamespace(autocast=contextlib.nullcontext)
    state = SimpleNamespace(strategy=strategy, world=ranks, precision=precision, step=1)
    state.forward, state.seed = nn.Module(), 0
    (losses,) = losses_of_one_batch(state, batch)
    return seen, float.fromhex(losses["loss"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_probes_the_model_on_its_own_device(rank):
    assert run_on_python_device(probe, rank) == ([NAME], 3.0)


def fail_once(marker):
    """Fails as a GPU does, on rank 1 and the first time alone."""
    if os.environ["RANK"] == "1":
        with contextlib.suppress(FileExistsError), open(marker, "x"):
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
    return os.getpid()


def test_a_rank_that_lost_its_gpu_is_replaced(tmp_path):
    workers = Workers(tmp_path / "log")
    try:
        first, failed = workers.run(2, answering, fail_once, str(tmp_path / "marker"))
        assert "device-side assert triggered" in failed.error
        again, replaced = workers.run(2, answering, fail_once, str(tmp_path / "marker"))
    finally:
        workers.close()
    assert first.value == again.value  # the other rank goes on
    assert (replaced.error, replaced.value > 0) == (None, True)


def test_gpus_are_counted_without_starting_the_driver(monkeypatch):
    """A process that counts GPUs may be forked later."""
    asked = []
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: asked.append(1) or 0, raising=False)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 3)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    assert (devices.gpus(), asked) == (3, [])
