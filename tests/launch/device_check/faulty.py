"""A device that lies: operations of torch whose results get a flipped bit, as ranks of tests need it."""

import itertools

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.parallel.world import join_world
from lockstep.launch.device_check import memory, run

INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class Flips(TorchDispatchMode):
    """Flips a bit of the last element of an operation's result, each time from `first` on, every `every` times."""

    def __init__(self, operation, bit=-2, first=0, every=1):
        super().__init__()
        self.operation, self.bit, self.due = operation, bit, itertools.count(-first)
        self.every = every

    def __torch_dispatch__(self, called, types, arguments=(), options=None):
        result = called(*arguments, **(options or {}))
        if self.operation in str(called):
            number = next(self.due)
            if number >= 0 and number % self.every == 0:
                flip(result if isinstance(result, torch.Tensor) else result[0], self.bit)
        return result


def flip(tensor, bit):
    bits = tensor.view(INTEGERS[tensor.element_size()]).reshape(-1)
    bits[-1] ^= 1 << (bit % (8 * tensor.element_size()))


def check(faulty, operation, bit=-2, first=0, every=1):
    """The reports of all ranks, where an operation of rank `faulty` lies."""
    with join_world("cpu") as world:
        if world.rank != faulty:
            return run.check(world, seconds=0)
        if operation == "all_reduce":
            return with_wrong_sums(lambda: run.check(world, seconds=0))
        if operation == "memory":
            return with_wrong_memory(lambda: run.check(world, seconds=0))
        with Flips(operation, bit, first, every):
            return run.check(world, seconds=0)


def with_wrong_sums(call):
    original = dist.all_reduce

    def lying(tensor, *arguments, **options):
        work = original(tensor, *arguments, **options)
        if tensor.dtype == torch.bfloat16:
            tensor[5] += 2
        return work

    dist.all_reduce = lying
    try:
        return call()
    finally:
        dist.all_reduce = original


def with_wrong_memory(call):
    original = memory._first_wrong

    def decayed(blocks, value, sign=1):
        blocks[-1][7] |= 1 << 20  # a bit that is always set
        return original(blocks, value, sign)

    memory._first_wrong = decayed
    try:
        return call()
    finally:
        memory._first_wrong = original
