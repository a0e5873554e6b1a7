"""The private functions of torch that Lockstep calls: these tests fail where another torch has changed them."""

import datetime
import time

import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lockstep.core.parallel import torch_internals
from tests.processes import HANG_S


def test_functions_do_what_they_are_used_for():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.zeros(5))
        deadline = time.monotonic() + HANG_S
        while not (newest := torch_internals.recorded_collectives()[-1])["retired"] and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread of torch notes the end of a collective
        assert newest["process_group"] == ["0", "default_pg"]
        assert (newest["profiling_name"], newest["input_sizes"]) == ("gloo:all_reduce", [[5]])
        assert (newest["input_dtypes"], newest["retired"], newest["is_p2p"]) == (["Float"], True, False)
        assert {"collective_seq_id", "p2p_seq_id", "state"} <= newest.keys()
        torch_internals.set_timeout(dist.group.WORLD, datetime.timedelta(seconds=5))
        assert torch_internals.timeouts(dist.group.WORLD) == {datetime.timedelta(seconds=5)}
        linear = fully_shard(torch.nn.Linear(2, 2, bias=False), mesh=init_device_mesh("cpu", (1,)))
        ((owner, name, (sharded, _)),) = torch_internals.sharded_places(linear)
        assert (owner is linear, name, sharded is linear.weight) == (True, "weight", True)
        linear.unshard()
        ((_, _, (_, gathered)),) = torch_internals.sharded_places(linear)
        assert gathered is linear.weight is not sharded
    finally:
        torch_internals.abort_groups()
    assert not dist.is_initialized()


def test_every_recorder_of_this_torch_is_asked(monkeypatch):
    """Builds with NCCL have a recorder of their own, with the same format."""
    module = torch._C._distributed_c10d
    expected = {"_dump_fr_trace_json"} | ({"_dump_nccl_trace_json"} if dist.is_nccl_available() else set())
    assert {name for name in torch_internals._RECORDERS if hasattr(module, name)} == expected
    content = b'{"entries": [{"profiling_name": "nccl:all_reduce"}]}'
    monkeypatch.setattr(module, "_dump_nccl_trace_json", lambda: content, raising=False)
    assert torch_internals.recorded_collectives()[-1] == {"profiling_name": "nccl:all_reduce"}


def test_hooks_of_a_parameter_are_seen():
    parameter, found = torch.nn.Parameter(torch.ones(2)), []
    for has_hooks, register in (
        (torch_internals.has_gradient_hooks, parameter.register_hook),
        (torch_internals.has_hooks_after_accumulation, parameter.register_post_accumulate_grad_hook),
    ):
        assert not has_hooks(parameter)
        handle = register(lambda tensor: found.append(tensor))
        assert has_hooks(parameter)
        handle.remove()
        assert not has_hooks(parameter)


def test_parameters_have_the_tensors_into_which_they_were_gathered():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1, bias=False))
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert torch_internals.gathered_parameters(model) == []
        model(torch.ones(1, 2))
        for module, names in ((model[0], ["0.weight", "0.bias"]), (model, ["1.weight"])):
            module.reshard()
            found = torch_internals.gathered_parameters(module)
            assert [id(model.get_parameter(name)) for name in names] == [id(parameter) for parameter, _ in found]
            module.unshard()
            assert [id(model.get_parameter(name)) for name in names] == [id(gathered) for _, gathered in found]
    finally:
        torch_internals.abort_groups()
