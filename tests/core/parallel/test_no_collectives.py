"""A collective in `Task.model` is an error on all ranks, and no hang."""

import pytest
import torch
from torch import distributed, nn

from lockstep.core.errors import LockstepError
from tests import own_tasks, runs
from tests.ranks import run_ranks


class Scattering(own_tasks.Masked):
    def model(self):
        model = super().model()
        distributed.broadcast(model[0].weight.data, 0)
        return model


class TensorParallel(own_tasks.Masked):
    def model(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        model = super().model()
        parallelize_module(model, init_device_mesh("cpu", (distributed.get_world_size(),)), {"0": ColwiseParallel()})
        return model


class Seeing(own_tasks.Masked):
    """A model that asks for its rank and its world, without communication."""

    def model(self):
        assert distributed.get_world_size() == 2
        model = super().model()
        nn.init.normal_(model[0].weight, generator=torch.Generator(model[0].weight.device).manual_seed(1))
        return model


def failure(kind, strategy):
    try:
        runs.fit(globals()[kind](), runs.config(train={"steps": 2}, parallel={"strategy": strategy}))
    except LockstepError as error:
        return str(error)
    return None


@pytest.mark.cases("TensorParallel-fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["Scattering", "TensorParallel"])
def test_a_collective_in_the_model_is_named_with_its_line(kind, strategy):
    found = run_ranks(2, failure, kind, strategy)
    assert all(found)
    first = found[0]
    assert "Task.model: it makes a collective (" in first
    assert "test_no_collectives.py:" in first
    assert "parallel.tensor splits its layers" in first


def test_a_model_may_ask_for_its_world():
    assert run_ranks(2, failure, "Seeing", "ddp") == [None, None]
