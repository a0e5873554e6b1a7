"""Where the tests on GPUs compute, and what they ask of a device that torch has for each kind in its own way."""

import contextlib
import gc
import json
import os
import warnings

import torch

from lockstep.core import devices
from tests import runs

VARIABLE = "LOCKSTEP_TEST_DEVICE"
"""Environment variable: the kind of the device on which the tests run. Without it, they run on CUDA.

`cpu` runs the bodies of the tests on the CPU, where they make sense, and `pygpu` runs them on the device in Python of
`tests/python_device.py`. Both show that the tests run. They show nothing about a GPU.
"""


def wanted():
    """The kind of the device: cuda, cpu or pygpu."""
    return os.environ.get(VARIABLE, "cuda")


def gpus():
    """How many devices there are for ranks. The CPU takes any number."""
    return {"cpu": 2**10, "pygpu": 1}.get(wanted(), devices.gpus())


class Place:
    """The device on which a test computes."""

    def __init__(self, kind):
        self.kind = kind
        self.python = None
        if kind == "pygpu":
            from lockstep.core.parallel import world
            from tests import python_device

            self.python = python_device.install()
            world.pick_device = lambda *_, **__: torch.device(python_device.NAME, 0)
        self.device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
        self.adapter = devices.of(self.device)
        self.key = "auto" if self.python else kind
        """The value of the config's key `device`."""

    def settings(self, **sections):
        """A config for tests, as `runs.config`, on this device."""
        return runs.config(**{"device": self.key} | sections)

    def free(self):
        """Give back all memory that nothing uses."""
        gc.collect()
        if self.kind != "cpu":
            self.adapter.module.empty_cache()

    @contextlib.contextmanager
    def reads(self):
        """Gives a list. At the end, it holds the line of each wait of the host for the device. Empty on the CPU.

        On CUDA these are the waits that torch knows of (`torch.cuda.set_sync_debug_mode`): copies to the host, copies
        from memory that is not pinned, and operations such as `nonzero`.
        """
        found = []
        if self.kind == "cpu":
            yield found
        elif self.python:
            begin = len(self.python.log)
            yield found
            new = self.python.log[begin:]
            found += [f"{one.name} at {one.where}" for one in new if one.name.startswith("read ")]
        else:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    yield found
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            found += [
                f"{one.filename}:{one.lineno}" for one in told if "called a synchronizing CUDA" in str(one.message)
            ]

    @contextlib.contextmanager
    def memory_limit(self, size):
        """Inside, the device refuses more than `size` bytes beyond those that are reserved now."""
        self.free()
        if self.python:
            self.python.limit = self.python.bytes + size
            try:
                yield
            finally:
                self.python.limit = None
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(self.device) + size) / total, 0)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, 0)

    @contextlib.contextmanager
    def queued(self, file):
        """Gives two lists. At the end, they hold what was queued inside, on CUDA only: copies from the host, and
        kernels. Each is a pair of the name and the number of its stream, and begin and end in microseconds."""
        copies, kernels = [], []
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield copies, kernels
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(file))
        for event in json.loads(file.read_text())["traceEvents"]:
            row = (event.get("name"), event.get("args", {}).get("stream"), event.get("ts"), event.get("dur"))
            if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]:
                copies.append(row)
            elif event.get("cat") == "kernel":
                kernels.append(row)
