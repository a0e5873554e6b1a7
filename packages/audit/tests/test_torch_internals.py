"""The private functions of torch and of Python that observers ask: another torch may have changed them."""

import datetime
import time

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from lockstep_audit.observe import torch_internals
from packages.audit.tests.processes import HANG_S


def test_functions_do_what_they_are_used_for():
    timeout = datetime.timedelta(seconds=70)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        dist.all_reduce(torch.zeros(5))
        deadline = time.monotonic() + HANG_S
        while not (newest := torch_internals.recorded_collectives()[-1])["retired"] and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread of torch notes the end of a collective
        assert newest["process_group"] == ["0", "default_pg"]
        assert (newest["profiling_name"], newest["input_sizes"]) == ("gloo:all_reduce", [[5]])
        assert (newest["input_dtypes"], newest["retired"], newest["is_p2p"]) == (["Float"], True, False)
        assert {"collective_seq_id", "p2p_seq_id", "state"} <= newest.keys()
        assert torch_internals.timeouts(dist.group.WORLD) == {timeout}
    finally:
        dist.destroy_process_group()


def test_every_recorder_of_this_torch_is_asked(monkeypatch):
    """Builds with NCCL have their own recorder, with the same format."""
    module = torch._C._distributed_c10d
    expected = {"_dump_fr_trace_json"} | ({"_dump_nccl_trace_json"} if dist.is_nccl_available() else set())
    assert {name for name in torch_internals._RECORDERS if hasattr(module, name)} == expected
    content = b'{"entries": [{"profiling_name": "nccl:all_reduce"}]}'
    monkeypatch.setattr(module, "_dump_nccl_trace_json", lambda: content, raising=False)
    assert torch_internals.recorded_collectives()[-1] == {"profiling_name": "nccl:all_reduce"}


def test_the_main_thread_moves_between_instructions_of_python():
    main = torch_internals.MainThreadProbe()
    assert main.has_moved()
    assert main.has_moved()  # this line is such an instruction
