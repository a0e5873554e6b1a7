"""Probing: each rank has its own loss, so ranks are compared by the loss of one batch that all of them compute.

torchrun --nproc-per-node 4 examples/tricks/15_probe.py
torchrun --nproc-per-node 4 examples/tricks/15_probe.py --wrong   # flips a bit of a weight on the last rank
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toy import digits, make_model, mistake, say, shuffled, start

wrong = mistake("replica")
rank, world = start()
images, labels = digits()
model = DistributedDataParallel(make_model())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def on_all_ranks(value):
    """The value of each rank, on every rank."""
    values = [None] * world
    dist.all_gather_object(values, value)
    return values


def odd_one_out(values):
    """The ranks whose value differs from the majority."""
    usual, _ = Counter(values).most_common(1)[0]
    return [rank for rank, value in enumerate(values) if value != usual]


order = shuffled(len(images), epoch=0)
for step in range(20):
    mine = order[step * 64 : (step + 1) * 64][rank::world]
    loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
say(f"the loss of each rank on its own samples: {', '.join(f'{v:.4f}' for v in on_all_ranks(loss.item()))}")

if wrong and rank == world - 1:
    weight = model.module[1].weight.data
    weight.view(torch.int32)[0, 30] ^= 1 << 20

model.eval()  # no dropout, and no new statistics
with torch.no_grad():
    probe = nn.functional.cross_entropy(model.module(images[:64]), labels[:64]).item()
losses = on_all_ranks(probe)
say(f"the loss of each rank on the same samples: {', '.join(f'{v:.4f}' for v in losses)}")
say(f"ranks whose loss differs: {odd_one_out(losses)}")
for name, tensor in model.module.state_dict().items():
    others = odd_one_out(on_all_ranks(tensor.cpu().numpy().tobytes()))
    if others:
        say(f"the first tensor that differs on ranks {others}: {name}")
        break
else:
    say("no tensor differs")
