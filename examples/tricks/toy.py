"""What the tricks share: the digits, a small model, the ranks, and the options --wrong and --device."""

import argparse
import atexit
import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lockstep_recipes.recipes.digits import Digits


def mistake(*names):
    """The mistake in `--wrong NAME`, or None. `--wrong` without a name means the first one."""
    return arguments(*names).wrong


def arguments(*names):
    """The options of a trick: `wrong`, and `device`, which is cpu or cuda."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU per rank, NCCL")
    if names:
        parser.add_argument("--wrong", nargs="?", const=names[0], choices=names)
    given = parser.parse_args() if names else parser.parse_known_args()[0]
    if given.device == "cuda" and int(os.environ.get("LOCAL_RANK", 0)) >= torch.cuda.device_count():
        parser.error(f"--device cuda: each rank needs a GPU, but torch sees {torch.cuda.device_count()} here")
    return given


def start():
    """Join the ranks that torchrun has started. Returns this process's rank, and the number of ranks."""
    torch.set_num_threads(1)
    backend = "gloo"
    if arguments().device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        backend = "nccl"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:  # started by python: a world of one rank
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def place():
    """The device of this rank. NCCL only sends what is on it: models, data, and counts that are summed over ranks."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@atexit.register
def leave():
    """Leave the group when the script has ended, after the script's models are gone.

    DDP's model holds the group. Destroying the group before the model can hang. Leaving both to the end of Python can
    abort the process, because gloo's threads may still need the interpreter (both observed with torch 2.13).
    """
    if dist.is_initialized():
        vars(sys.modules["__main__"]).clear()
        gc.collect()
        dist.destroy_process_group()


def digits(training=True):
    """Images (samples, 1, 8, 8) from 0 to 1, and labels (samples,) from 0 to 9."""
    data = Digits(training)
    return (data.images / 255).to(place()), torch.from_numpy(data.labels).to(place())


def make_model():
    """The same weights on every call, and so on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(place())


def shuffled(count, epoch):
    """The numbers below `count` in an order that only depends on the epoch: drawn on the CPU, whatever the device."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch))


def accuracy(model):
    """The fraction of the held-back digits that a model recognises."""
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
    """The length of the difference, as a fraction of the length of the truth."""
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
    """Print only on rank 0."""
    if dist.get_rank() == 0:
        print(text)
