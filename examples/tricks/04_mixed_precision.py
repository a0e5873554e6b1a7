"""Compute in 16 bits (bf16), keep the weights in 32 bits.

torchrun --nproc-per-node 2 examples/tricks/04_mixed_precision.py
torchrun --nproc-per-node 2 examples/tricks/04_mixed_precision.py --wrong   # also keeps the weights in 16 bits
"""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from toy import digits, flat, gradient, make_model, mistake, place, say, shuffled, start

wrong = mistake("weights")
rank, world = start()
images, labels = digits()
model = make_model()
if wrong:
    model, images = model.bfloat16(), images.bfloat16()
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
for epoch in range(10):
    for batch in shuffled(len(labels), epoch).split(64):
        mine = batch[rank::world]
        optimizer.zero_grad()
        with torch.autocast(
            place().type, torch.bfloat16, enabled=not wrong
        ):  # around forward pass and loss, not backward
            output = model(images[mine])
            loss = cross_entropy(output, labels[mine], reduction="sum") * world / len(batch)
        loss.backward()
        before = flat(model.parameters())
        optimizer.step()

moved = (flat(model.parameters()) != before)[gradient(model) != 0].float().mean().item()
held_back, truth = digits(training=False)
with torch.no_grad():
    loss = cross_entropy(model(held_back.to(before.dtype)).float(), truth).item()
say(f"format of the activations: {output.dtype}, of the weights: {before.dtype}")
say(f"weights that the last update changed, of those with a gradient: {moved:.3f}")
say(f"loss on the held-back digits: {loss:.3f}")
