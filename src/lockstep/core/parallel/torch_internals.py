"""Private functions of torch and of Python, in one place. A test calls each, and fails if it changes."""

from __future__ import annotations

import ctypes
import datetime
import json
from typing import Any

import torch
import torch.distributed as dist

_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo; of NCCL, in torch builds that have it


def abort_groups() -> None:
    """Leave all process groups of this process without waiting for their collectives."""
    dist.distributed_c10d._abort_process_group()


def set_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """Set how long the collectives of `group` wait for other ranks."""
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(timeout, group)  # public since 2.15


def timeouts(group: dist.ProcessGroup) -> set[datetime.timedelta]:
    """How long the collectives of `group` wait for other ranks, on each kind of device."""
    return {group._get_backend(device).options._timeout for device in group._device_types}


def recorded_collectives() -> list[dict[str, Any]]:
    """What torch's flight recorders hold: the newest collectives of this process, the oldest first, for each backend.

    Each has `process_group` (name and description), `profiling_name` (`gloo:all_reduce`), `collective_seq_id`,
    `input_sizes`, `input_dtypes`, `state` and `retired` (it has ended).
    """
    module = torch._C._distributed_c10d
    entries: list[dict[str, Any]] = []
    for name in _RECORDERS:
        dump = getattr(module, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    return entries


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """True if a function was given to `register_hook` of a parameter."""
    return bool(parameter._backward_hooks)


def has_hooks_after_accumulation(parameter: torch.Tensor) -> bool:
    """True if a function was given to `register_post_accumulate_grad_hook` of a parameter."""
    return bool(parameter._post_accumulate_grad_hooks)


def gathered_parameters(module: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters of a module that `fully_shard` was applied to, each with the tensor it was last gathered into.

    A parameter that was never gathered is left out. Parameters of modules within, to which `fully_shard` was applied,
    are left out, too.
    """
    return [(p.sharded_param, p._unsharded_param) for p in _sharded(module) if hasattr(p, "_unsharded_param")]


def drop_gathered_gradients(module: Any) -> None:
    """Drop the gradients of gathered parameters that wait for an exchange, see `gathered_parameters`."""
    for of in _sharded(module):
        vars(of)["unsharded_accumulated_grad"] = None  # since torch 2.15, the parameter's own `grad` is meant
        if hasattr(of, "_unsharded_param"):
            of._unsharded_param.grad = None


def sharded_places(module: Any) -> list[tuple[torch.nn.Module, str, tuple[Any, ...]]]:
    """For each parameter that FSDP gathers for `module`: the module that registers it, its name there, and the objects
    that FSDP puts there, sharded or gathered."""
    return [
        (of._module_info.module, of._module_info.param_name, (of.sharded_param, getattr(of, "_unsharded_param", None)))
        for of in _sharded(module)
    ]


def _sharded(module: Any) -> list[Any]:
    """What FSDP keeps of each parameter that it gathers for `module`. Older versions of torch have one group."""
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [of for group in groups if group is not None for of in group.fsdp_params]


class MainThread:
    """True if Python's main thread executes Python code, or stays inside one call of a C function.

    The interpreter is asked to empty a set. Its main thread does this between two instructions of Python code, so it
    does not do it inside a C function. No Python code runs for this.
    """

    def __init__(self) -> None:
        self._asked: set[int] = set()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._asked))  # the request may outlive this object

    def has_moved(self) -> bool:
        """True if the main thread has executed Python code since the call before this; true at the first call."""
        if self._asked:
            return False
        self._asked.add(1)
        empty = ctypes.cast(ctypes.pythonapi.PySet_Clear, ctypes.c_void_p)
        if ctypes.pythonapi.Py_AddPendingCall(empty, ctypes.c_void_p(id(self._asked))):
            self._asked.clear()  # too many others ask just now
        return True
