"""One rank with a process group of NCCL: what strategies and collectives of several GPUs do, as far as one shows it."""

import pytest
import torch
import torch.distributed as dist

from lockstep.core import run_model
from lockstep.core.parallel.ddp import DDP
from lockstep.core.parallel.fsdp import FSDP
from lockstep.core.parallel.options import ParallelConfig
from tests import own_tasks, runs
from tests.gpu import cases

pytestmark = pytest.mark.gpu
STRATEGIES = {
    "ddp": lambda world: DDP(world, ParallelConfig()),
    "ddp, static graph": lambda world: DDP(world, ParallelConfig(static_graph=True)),
    "fsdp": lambda world: FSDP(world, ParallelConfig()),
    "fsdp, kept gathered": lambda world: FSDP(world, ParallelConfig(reshard_after_forward=False, forward_prefetch=1)),
    "fsdp, offloaded": lambda world: FSDP(world, ParallelConfig(cpu_offload=True)),
}


@pytest.fixture
def group(processes_place, monkeypatch):
    """A process group of this process alone, with the backend that ranks on such devices have."""
    place = processes_place
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    dist.init_process_group(place.adapter.group_backend, store=dist.HashStore(), rank=0, world_size=1)
    yield place
    dist.destroy_process_group()


@pytest.fixture
def strategy(request, monkeypatch):
    """For one rank the factory makes no DDP and no FSDP. In these tests it does."""
    make = STRATEGIES[request.param]
    monkeypatch.setattr(run_model, "make_strategy", lambda options, world, **_: make(world))
    return request.param


@pytest.mark.parametrize("strategy", STRATEGIES, indirect=True)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_strategy_on_one_rank_trains_the_weights_of_a_single_one(precision, strategy, group):
    expected, _ = runs.by_hand(own_tasks.Deep(dtype=torch.float32), clip_norm=0.5)
    settings = group.settings(precision=precision, batch={"global": 24, "micro": 12}, optim={"clip_norm": 0.5})
    found = cases.weights(own_tasks.Deep(dtype=torch.float32), settings)
    for tensors in (expected, found):
        tensors.pop("calls")
    assert runs.difference(found, expected) < (1e-4 if precision == "fp32" else 0.2)


@pytest.mark.parametrize("strategy", STRATEGIES, indirect=True)
def test_what_a_strategy_saves_goes_on_with_the_same_bits(strategy, group, tmp_path):
    settings = group.settings(compute=cases.DETERMINISTIC, train={"steps": 10, "ema_decay": 0.9})
    expected = cases.weights(own_tasks.Deep(dtype=torch.float32, dropout=0.1), settings, tmp_path / "straight")
    for steps in (4, 10):
        settings["train"]["steps"] = steps
        found = cases.weights(own_tasks.Deep(dtype=torch.float32, dropout=0.1), settings, tmp_path / "resumed")
    assert not cases.same(found, expected)


@pytest.mark.parametrize("strategy", ["fsdp, offloaded"], indirect=True)
def test_offloaded_states_are_in_host_memory(strategy, group):
    with cases.prepared(own_tasks.Deep(dtype=torch.float32), group.settings()) as run:
        cases.take_steps(run, 2)
        assert {parameter.device.type for parameter in run.model.parameters()} == {"cpu"}
        slots = [slot for state in run.state.optimizer.state.values() for slot in state.values()]
        assert {slot.device.type for slot in slots if isinstance(slot, torch.Tensor)} == {"cpu"}


def test_group_takes_tensors_of_the_host_and_of_the_device(group):
    for device in ("cpu", group.device):
        ones = torch.ones(3, device=device)
        dist.all_reduce(ones)
        assert ones.tolist() == [1, 1, 1]
        dist.broadcast(ones.view(torch.uint8), 0)
    found = [None]
    dist.all_gather_object(found, {"rank": 0})
    assert found == [{"rank": 0}]
    background = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(3), group=background)
    dist.barrier()


def test_report_of_a_hang_names_the_collectives_of_the_device(group):
    flight_recorder = pytest.importorskip("lockstep.launch.flight_recorder")
    dist.all_reduce(torch.ones(3, 5, device=group.device))
    text = flight_recorder.describe({0: flight_recorder.of_this_rank()})
    backend = "nccl" if group.kind == "cuda" else "gloo"
    assert f"{backend}:all_reduce" in text
    assert "[3, 5]" in text or "3, 5" in text
