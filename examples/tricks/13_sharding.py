"""Sharding: each rank keeps a shard of weights, gradients and optimizer state, and gathers a block while it computes.

torchrun --nproc-per-node 2 examples/tricks/13_sharding.py
torchrun --nproc-per-node 2 examples/tricks/13_sharding.py --wrong   # shards the model as a single block
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from toy import deviation, flat, mistake, place, say, start

WIDTH, BLOCKS = 64, 4

wrong = mistake("one_block")
rank, world = start()
inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(rank)).to(place())


def bytes_here(tensors):
    """The bytes that this rank keeps of some tensors."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def make_blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS))).to(place())


def train(model):
    """Five updates with Adam. Returns the weights, and the bytes of parameters, gradients and optimizer state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(5):
        model(inputs).square().mean().backward()
        held = [list(model.parameters()), [parameter.grad for parameter in model.parameters()]]
        optimizer.step()
        kept = [bytes_here(tensors) for tensors in held]
        optimizer.zero_grad()
    state = [value for entry in optimizer.state.values() for value in entry.values() if value.dim()]
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return flat(weights), [*kept, bytes_here(state)]


def gathered(model):
    """The bytes of the largest block that is gathered at once, on every rank."""
    largest = [0]

    def look(module, *_):
        largest[0] = max(largest[0], sum(p.nbytes for p in module.parameters() if not isinstance(p, DTensor)))

    for module in model.modules():
        module.register_forward_hook(look, prepend=True)
    model(inputs)
    return largest[0]


replicated, bytes_ddp = train(DistributedDataParallel(make_blocks()))
model = make_blocks()
mesh = init_device_mesh(place().type, (world,))
if not wrong:
    for block in model:
        fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
sharded, bytes_fsdp = train(model)
say(f"bytes of weights, gradients and Adam's state on rank 0 with DDP: {bytes_ddp}")
say(f"bytes of weights, gradients and Adam's state on rank 0 with FSDP: {bytes_fsdp}")
say(f"largest block that is gathered: {gathered(model)} bytes")
say(f"deviation of the weights from DDP: {deviation(sharded, replicated):.3g}")
for ranks in (1, 8, 64):
    held = 7e9 * (4 + 4 + 8) / ranks / 1e9
    say(f"7 billion parameters in fp32 with Adam, sharded over {ranks}: {held:.2f} GB on each GPU")
