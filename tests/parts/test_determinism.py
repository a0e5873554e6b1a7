"""Deterministic kernels, the waits of the host that a device tells of, and the threads of ranks."""

import os

import pytest
import torch
from torch import nn

from lockstep.core import devices
from lockstep.core.errors import UsageError
from lockstep.core.parallel.precision import check_supported
from lockstep.launch import launcher
from lockstep.parts import determinism
from lockstep_lab.verify import worker_functions
from lockstep_lab.verify.experiments import ExperimentFailed, ExperimentRunner
from lockstep_lab.verify.step_operations import StepOperations
from tests import own_tasks, runs
from tests.python_device import NAME
from tests.ranks import run_on_python_device


class Unpooled(own_tasks.Plain):
    """Its model has an operation without a deterministic kernel."""

    def loss(self, model, batch):
        values, places = nn.functional.max_pool1d(batch[0][:, None].float(), 2, return_indices=True)
        return super().loss(model, batch) + 0 * nn.functional.max_unpool1d(values, places, 2).sum()


@pytest.fixture
def settings():
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == before


def test_an_operation_without_a_deterministic_kernel_is_named(settings, tmp_path):
    config = runs.config(train={"steps": 2}, compute={"deterministic": True})
    with pytest.raises(UsageError, match=r"max_unpool\S* has no deterministic implementation") as caught:
        runs.fit(Unpooled(), config, tmp_path)
    assert caught.value.where == "compute.deterministic=true"
    assert "compute.deterministic=false" in caught.value.remedy


def test_inside_torch_is_told_to_be_deterministic(settings, monkeypatch):
    monkeypatch.delenv(determinism.WORKSPACE, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with determinism.deterministic(enabled=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
        assert os.environ[determinism.WORKSPACE] == ":4096:8"
    with determinism.deterministic(enabled=False):
        assert not torch.are_deterministic_algorithms_enabled()


def test_verify_computes_float32_with_all_bits():
    def formats():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = formats()
    torch.set_float32_matmul_precision("high")
    try:
        assert worker_functions.answering(formats).value == ("highest", False)
        assert formats()[0] == "high"
    finally:
        torch.set_float32_matmul_precision(before[0])


def test_verify_repeats_itself_with_deterministic_kernels_where_there_are_some(tmp_path, monkeypatch):
    config = {"device": "cpu", "batch": {"global": 8}}
    tried = []

    def undisturbed(experiments):
        tried.append(experiments.deterministic)
        if experiments.deterministic:
            raise ExperimentFailed(
                "undisturbed", "x_backward has no deterministic implementation\n  remedy", refused=True
            )
        return ["recorded"]

    monkeypatch.setattr(ExperimentRunner, "_undisturbed", undisturbed)
    experiments = ExperimentRunner(config, 2, tmp_path, None, deterministic=True)
    assert experiments.undisturbed() == experiments.undisturbed() == ["recorded"]
    assert tried == [True, False]
    assert experiments.not_deterministic == "x_backward has no deterministic implementation"
    assert ExperimentRunner(config, 2, tmp_path, None).deterministic is False


def waits(device):
    parameter = nn.Parameter(torch.ones(4, device=NAME))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with StepOperations(optimizer, device=devices.of(torch.device(NAME, 0))) as operations:
        torch.nonzero(parameter.detach())
        parameter.sum().backward()
        optimizer.step()
    return operations.communication.host_waits


@pytest.mark.exhaustive
def test_a_wait_that_no_operation_shows_is_noted_where_the_device_tells_of_it():
    ((_, in_package),) = run_on_python_device(waits)
    assert not in_package


def test_cuda_tells_of_its_waits_by_warnings(monkeypatch):
    """The warning is that of torch's `warn_or_error_on_sync`; here Python raises it."""
    import warnings

    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(devices.Cuda, "__init__", lambda self: None)
    noted = []
    with devices.Cuda().watched_waits(lambda: noted.append(1)):
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)", stacklevel=1)
    assert (noted, modes) == ([1, 1, 1], ["warn", 0])


@pytest.mark.parametrize(("host_computes", "threads"), [(False, "1"), (True, "4")])
def test_ranks_that_compute_on_the_host_share_its_cores(host_computes, threads, monkeypatch):
    monkeypatch.setattr(launcher, "os", type("Os", (), {"environ": {}, "sched_getaffinity": lambda _: set(range(8))}))
    launcher.prepare(2, cold=True, host_computes=host_computes)
    assert launcher.os.environ["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(("name", "capability"), [("Tesla V100-SXM2-16GB", (7, 0)), ("Tesla T4", (7, 5))])
def test_bf16_on_a_gpu_without_it_is_refused_with_fp16_as_the_remedy(name, capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(devices.Cuda, "name", lambda _: name)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(devices, "of", lambda _: devices.Cuda(device))
    with pytest.raises(UsageError, match=f"{name} has no bf16") as caught:
        check_supported("bf16", device)
    assert "precision=fp16" in caught.value.remedy
    check_supported("fp16", device)
