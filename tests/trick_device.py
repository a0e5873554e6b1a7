"""Runs a trick on a single rank whose device is the device in Python, which refuses to mix tensors of two devices."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests import python_device

TRICKS = Path(__file__).resolve().parents[1] / "examples" / "tricks"


class Alone(nn.Module):
    """What DDP is on one rank."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)

    @contextlib.contextmanager
    def no_sync(self):
        yield

    def register_comm_hook(self, *_):
        pass


class Done:
    """The work of a collective on one rank."""

    def wait(self, timeout=None):
        pass


def run_trick(device, name):
    """What the trick `name` prints where `toy.place()` is `device`, and the kinds of devices of what it sums."""
    sys.path.insert(0, str(TRICKS))
    sys.modules.pop("toy", None)
    import toy

    sent = []

    def reduce(tensor, *_, **__):
        sent.append(tensor.device.type)
        return Done()

    toy.place = lambda: torch.device(python_device.NAME, 0)
    python_device.PythonTensor.__format__ = lambda tensor, spec: format(tensor.item() if spec else repr(tensor), spec)
    nn.parallel.DistributedDataParallel = Alone
    dist.all_reduce, sys.argv = reduce, [name]
    dist.all_gather = lambda parts, own, **_: reduce(parts[0].copy_(own))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(TRICKS / f"{name}.py"), run_name="__main__")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return printed.getvalue(), sent
