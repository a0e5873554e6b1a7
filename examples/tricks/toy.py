"""What the tricks share: the digits, a small model, the ranks, and the option for mistakes."""

import argparse
import atexit
import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lockstep.sources.digits import Digits


def mistake(*names):
    """The mistake that `--wrong NAME` asks for, or None. `--wrong` alone means the first name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrong", nargs="?", const=names[0], choices=names)
    return parser.parse_args().wrong


def start():
    """Join the ranks that torchrun has started. Returns this process's rank, and the number of ranks."""
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:  # started by python: a world of one rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


@atexit.register
def leave():
    """Leave the group when the script has ended, after the script's models are gone.

    DDP's model holds the group. To destroy the group before the model can hang. To leave both to the end of Python can
    abort the process, because gloo's threads may still need the interpreter (both seen with torch 2.13).
    """
    if dist.is_initialized():
        vars(sys.modules["__main__"]).clear()
        gc.collect()
        dist.destroy_process_group()


def digits(training=True):
    """Images (samples, 1, 8, 8) from 0 to 1, and labels (samples,) from 0 to 9."""
    data = Digits(training)
    return data.images / 255, torch.from_numpy(data.labels)


def make_model():
    """The same weights on every call, and so on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def shuffled(count, epoch):
    """The numbers below `count` in an order that depends on the epoch alone."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch))


def accuracy(model):
    """The share of the held-back digits that a model recognises."""
    images, labels = digits(training=False)
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def flat(tensors):
    """All numbers of some tensors in one row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradient(model):
    """All gradients of a model in one row."""
    return flat(parameter.grad for parameter in model.parameters())


def deviation(value, truth):
    """The length of the difference, as a share of the length of the truth."""
    return ((value - truth).norm() / truth.norm()).item()


def count_traffic(model):
    """A list to which DDP appends the bytes of each bucket of gradients that it sends."""
    sent = []

    def send(group, bucket):
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    model.register_comm_hook(dist.group.WORLD, send)
    return sent


def say(text):
    """Print on rank 0 alone."""
    if dist.get_rank() == 0:
        print(text)
