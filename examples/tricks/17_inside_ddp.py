"""Inside DDP: weights are copied once, and gradients are averaged in buckets while the backward pass still computes.

torchrun --nproc-per-node 2 examples/tricks/17_inside_ddp.py
torchrun --nproc-per-node 2 examples/tricks/17_inside_ddp.py --wrong   # calls the model inside DDP
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from toy import mistake, place, say, start

wrong = mistake("bypass")
rank, world = start()


class TwoLayers(nn.Module):
    """Two layers of two weights, small enough to differentiate by hand: the sum of `inputs * first * last`."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.tensor([[1.0, 1.0], [5.0, 5.0]][rank]))
        self.last = nn.Parameter(torch.tensor([[1.0, 2.0], [5.0, 5.0]][rank]))

    def forward(self, inputs):
        return (inputs * self.first * self.last).sum()


def shown(tensor):
    return f"[{', '.join(f'{value:.3g}' for value in tensor.tolist())}]"


def on_ranks(tensor):
    """A tensor of each rank, as a text."""
    values = [None] * world
    dist.all_gather_object(values, shown(tensor))
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))


def send(_, bucket):
    say(f"  bucket {bucket.index()} is sent: {shown(bucket.buffer())}")
    return allreduce_hook(dist.group.WORLD, bucket)


model = TwoLayers().to(place())
say(f"last before DDP(model): {on_ranks(model.last)}")
ddp = DistributedDataParallel(model, bucket_cap_mb=8 / 2**20)  # 8 bytes: a bucket for each layer
say(f"last after DDP(model):  {on_ranks(model.last)}")
ddp.register_comm_hook(None, send)
for name, parameter in model.named_parameters():  # runs before the hook of DDP, which waits for the same gradient
    parameter.register_hook(lambda gradient, name=name: say(f"  rank 0 has computed {name}: {shown(gradient)}"))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.tensor([[2.0, 4.0], [4.0, 8.0]][rank]).to(place())
for step in (1, 2):
    say(f"backward pass {step}")
    optimizer.zero_grad()
    (model if wrong else ddp)(inputs).backward()
say(f"gradient of last afterwards: {on_ranks(model.last.grad)}")
optimizer.step()
say(f"last after an update with rate 0.1: {on_ranks(model.last)}")
