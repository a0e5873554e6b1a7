"""Clip the gradient after it is unscaled, once for each update, by the norm over all parameters.

torchrun --nproc-per-node 2 examples/tricks/06_clipping.py
torchrun --nproc-per-node 2 examples/tricks/06_clipping.py --wrong   # clips the scaled gradient
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from toy import accuracy, digits, gradient, make_model, mistake, say, shuffled, start

SCALE, LIMIT = 65536, 1.0

wrong = mistake("scaled")
rank, world = start()
images, labels = digits()
model = DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
norms = []
for epoch in range(3):
    for batch in shuffled(len(labels), epoch).split(64):
        mine = batch[rank::world]
        optimizer.zero_grad()
        loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum") * world / len(batch)
        (loss * SCALE).backward()
        if wrong:
            norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        for parameter in model.parameters():
            parameter.grad /= SCALE
        if not wrong:
            norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        norms.append((norm.item(), gradient(model).norm().item()))
        optimizer.step()

say(f"largest measured norm: {max(before for before, _ in norms):.3f}")
say(f"largest norm that reached the optimizer: {max(after for _, after in norms):.3g}")
say(f"accuracy {accuracy(model):.4f}")
