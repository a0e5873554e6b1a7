"""A sharded step over time: a block is gathered for the forward pass, freed, and gathered again for the backward pass.

torchrun --nproc-per-node 2 examples/tricks/19_sharded_step.py
torchrun --nproc-per-node 2 examples/tricks/19_sharded_step.py --wrong   # wraps the sharded model with DDP
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from toy import mistake, place, say, start

# torch 2.13 gave both a new name.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

wrong = mistake("nested")
rank, world = start()


class Collective:
    """A collective of a block that prints when it is called, and how many numbers a rank has before and after."""

    def __init__(self, name, function, block):
        self.name, self.function, self.block = name, function, block

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, *arguments, **options):
        say(f"  {self.name} of block {self.block}: {input_tensor.numel()} numbers -> {output_tensor.numel()}")
        return self.function(output_tensor, input_tensor, *arguments, **options)


def shard(model):
    mesh = init_device_mesh(place().type, (world,))
    for number, block in enumerate(model, start=1):
        fully_shard(block, mesh=mesh)
        block.set_custom_all_gather(Collective("all_gather", ALL_GATHER, number))
        block.set_custom_reduce_scatter(Collective("reduce_scatter", REDUCE_SCATTER, number))
        block.register_forward_pre_hook(lambda *_, number=number: say(f"  block {number} computes"))
    fully_shard(model, mesh=mesh)


model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh()) for _ in range(3))).to(place())
shard(model)
if wrong:
    try:
        DistributedDataParallel(model)
    except NotImplementedError as error:
        say(f"{type(error).__name__}: {error}")
else:
    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    say(f"rank 0 keeps {kept} of {sum(parameter.numel() for parameter in model.parameters())} weights")
    say("forward")
    loss = model(torch.ones(2, 4, device=place()) * (rank + 1)).sum()
    say("backward")
    loss.backward()
