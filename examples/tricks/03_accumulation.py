"""Several micro-batches for one update, with the right weights, and gradients that are exchanged once.

    torchrun --nproc-per-node 2 examples/tricks/03_accumulation.py
    ... --wrong mean      # averages the averages
    ... --wrong no_sync   # sends gradients every time

Labels are unknown for about 4 of 10 samples, as in real data. So micro-batches have different numbers of labels.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from toy import count_traffic, deviation, digits, gradient, make_model, mistake, say, shuffled, start

UNKNOWN = -100  # the label that cross_entropy ignores

wrong = mistake("mean", "no_sync")
rank, world = start()
images, labels = digits()
labels[torch.rand(len(labels), generator=torch.Generator().manual_seed(0)) < 0.4] = UNKNOWN
batch = shuffled(len(labels), epoch=0)[:64]
mine = batch[rank::world].split(4)

model = DistributedDataParallel(make_model())
sent = count_traffic(model)
known = (labels[batch[rank::world]] != UNKNOWN).sum()
dist.all_reduce(known)  # the number of known labels in the whole batch: one small message, before the first pass
for number, micro in enumerate(mine):
    last = number == len(mine) - 1
    with nullcontext() if last or wrong == "no_sync" else model.no_sync():  # around the forward pass, too
        output = model(images[micro])
        if wrong == "mean":
            loss = cross_entropy(output, labels[micro]) / len(mine)
        else:  # DDP divides by the number of ranks, so the loss is multiplied by it
            loss = cross_entropy(output, labels[micro], reduction="sum") * world / known
        loss.backward()

alone = make_model()  # the truth: the whole batch at once, on one process
cross_entropy(alone(images[batch]), labels[batch]).backward()
say(f"known labels in the micro-batches of rank 0: {[(labels[micro] != UNKNOWN).sum().item() for micro in mine]}")
say(f"deviation of the gradient from one process: {deviation(gradient(model), gradient(alone)):.3g}")
say(f"bytes of gradients sent for one update: {sum(sent)}")
