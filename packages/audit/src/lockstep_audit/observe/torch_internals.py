"""Private functions of torch and of Python that observers call. A test calls each, and fails if one changes."""

from __future__ import annotations

import ctypes
import datetime
import json
from typing import Any

import torch
import torch.distributed as dist

_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo; of NCCL, in torch builds that have it


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


class MainThreadProbe:
    """True if Python's main thread executes Python code; false if it stays inside one call of a C function.

    The interpreter is asked to empty a set. Its main thread does this between two instructions of Python code, so it
    cannot do it inside a C function. No Python code runs for this.
    """

    def __init__(self) -> None:
        self._asked: set[int] = set()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._asked))  # the request may outlive this object

    def has_moved(self) -> bool:
        """True if the main thread has executed Python code since the previous call; true at the first call."""
        if self._asked:
            return False
        self._asked.add(1)
        empty = ctypes.cast(ctypes.pythonapi.PySet_Clear, ctypes.c_void_p)
        if ctypes.pythonapi.Py_AddPendingCall(empty, ctypes.c_void_p(id(self._asked))):
            self._asked.clear()  # too many other requests are pending
        return True
