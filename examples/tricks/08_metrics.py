"""Ranks exchange sums, and divide once at the end. This holds for the loss in the log and for every metric.

torchrun --nproc-per-node 2 examples/tricks/08_metrics.py
torchrun --nproc-per-node 2 examples/tricks/08_metrics.py --wrong   # averages of averages, and only rank 0
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from toy import digits, make_model, mistake, place, say, shuffled, start


def macro_f1(confusion):
    """The mean over classes of 2 TP / (2 TP + FP + FN), from a matrix (truth, prediction) of counts."""
    hits = confusion.diag()
    return (2 * hits / (confusion.sum(dim=0) + confusion.sum(dim=1)).clamp(min=1)).mean().item()


wrong = mistake("averages")
rank, world = start()
images, labels = digits()
model = DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for batch in shuffled(len(labels), epoch=0).split(64):
    mine = batch[rank::world]
    optimizer.zero_grad()
    (cross_entropy(model(images[mine]), labels[mine], reduction="sum") * world / len(batch)).backward()
    optimizer.step()

images, labels = digits(training=False)
total, confusion, means = torch.zeros(2, device=place()), torch.zeros(10, 10, device=place()), []
with torch.no_grad():
    for batch in torch.arange(rank, len(labels), world).split(50):
        output = model.module(images[batch])
        loss = cross_entropy(output, labels[batch], reduction="sum")
        total += torch.tensor([loss.item(), len(batch)]).to(place())
        means.append(loss / len(batch))
        confusion += torch.bincount(labels[batch] * 10 + output.argmax(dim=1), minlength=100).view(10, 10)
if wrong:
    f1, mean = torch.tensor(macro_f1(confusion)), torch.stack(means).mean()
    say(f"loss of rank 0: {total[0] / total[1]:.4f}")
    for value in (f1, mean):
        dist.all_reduce(value.div_(world))
    say(f"mean of the means of batches and ranks: {mean:.4f}")
    say(f"mean of the ranks' macro F1: {f1:.4f}")
else:
    dist.all_reduce(total)
    dist.all_reduce(confusion)
    say(f"loss: {total[0] / total[1]:.4f} over {total[1]:.0f} samples")
    say(f"macro F1: {macro_f1(confusion):.4f}")
