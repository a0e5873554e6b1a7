"""Unused parameters: each batch uses one branch of the model, and DDP waits for the gradients of the others.

torchrun --nproc-per-node 2 examples/tricks/18_unused_parameters.py
torchrun --nproc-per-node 2 examples/tricks/18_unused_parameters.py --wrong   # without find_unused_parameters
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toy import mistake, place, say, start

wrong = mistake("waits")
rank, world = start()


class Branches(nn.Module):
    """Each branch multiplies by its weight. `c` is forgotten: no batch uses it."""

    def __init__(self):
        super().__init__()
        for name in "abc":
            setattr(self, name, nn.Parameter(torch.ones(())))

    def forward(self, inputs, branch):
        return getattr(self, branch) * inputs


model = DistributedDataParallel(Branches().to(place()), find_unused_parameters=not wrong)
ways = [("a", "a"), ("a", "b")]  # the branches of ranks 0 and 1 in each step
for step, way in enumerate(ways, start=1):
    model.zero_grad()
    try:
        loss = model(torch.tensor([4.0, 6.0][rank % 2], device=place()), way[rank % 2])
    except RuntimeError as error:
        say(f"step {step}: {type(error).__name__}: {str(error).split('. ')[0]}")
        break
    loss.backward()
    gradients = {name: p.grad if p.grad is None else p.grad.item() for name, p in model.module.named_parameters()}
    say(f"step {step}: rank 0 uses {way[0]}, rank 1 uses {way[1]}; gradients on rank 0: {gradients}")
dist.barrier()
