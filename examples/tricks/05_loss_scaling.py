"""A loss scale for fp16, whose smallest number is 6e-8.

    torchrun --nproc-per-node 2 examples/tricks/05_loss_scaling.py
    torchrun --nproc-per-node 2 examples/tricks/05_loss_scaling.py --wrong   # no scale: small gradients become zero

The loss has a factor of 0.00001 here, like a second head of a model. A scale that is too large gives infinities: the
update is skipped on all ranks, and the scale is halved.
"""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from toy import deviation, digits, gradient, make_model, mistake, place, say, shuffled, start

FACTOR = 1e-5

wrong = mistake("unscaled")
rank, world = start()
images, labels = digits()
model = DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / FACTOR)
scale, skipped = 1.0 if wrong else 2.0**42, 0
for batch in shuffled(len(labels), epoch=0).split(64):
    mine = batch[rank::world]
    optimizer.zero_grad()
    with torch.autocast(place().type, torch.float16):
        output = model(images[mine])
    loss = FACTOR * cross_entropy(output.float(), labels[mine], reduction="sum") * world / len(batch)
    (loss * scale).backward()
    for parameter in model.parameters():
        parameter.grad /= scale
    if not gradient(model).isfinite().all():  # an infinity on any rank is on all ranks after DDP's sum
        scale, skipped = scale / 2, skipped + 1
        continue
    last, weights = batch, [parameter.detach().clone() for parameter in model.parameters()]
    applied = gradient(model).clone()
    optimizer.step()

exact = make_model()  # the same gradient in fp32, for the last update
with torch.no_grad():
    for parameter, weight in zip(exact.parameters(), weights, strict=True):
        parameter.copy_(weight)
(FACTOR * cross_entropy(exact(images[last]), labels[last])).backward()
lost = (applied == 0)[gradient(exact) != 0].float().mean().item()
say(f"skipped updates: {skipped}, loss scale at the end: {scale:.0f}")
say(f"gradients that became zero: {lost:.3f}")
say(f"deviation of the gradient from fp32: {deviation(applied, gradient(exact)):.3f}")
