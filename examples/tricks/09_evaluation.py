"""Each evaluation sample counts once, although ranks may have different numbers of samples.

torchrun --nproc-per-node 2 examples/tricks/09_evaluation.py
torchrun --nproc-per-node 2 examples/tricks/09_evaluation.py --wrong   # repeats samples until all batches are full
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from toy import digits, make_model, mistake, place, say, shuffled, start

BATCH, SAMPLES = 32, 101  # a number that nothing divides

wrong = mistake("padded")
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
samples = torch.arange(SAMPLES)
if wrong:
    missing = -SAMPLES % (BATCH * world)
    samples = torch.cat([samples, samples[:missing]])
counts = torch.zeros(2, dtype=torch.long, device=place())
with torch.no_grad():
    for batch in samples[rank::world].split(BATCH):  # one rank may have one batch fewer than another
        output = model.module(images[batch])  # the bare model: DDP's forward may wait for the other ranks
        correct = (output.argmax(dim=1) == labels[batch]).sum().item()
        counts += torch.tensor([correct, len(batch)]).to(place())
dist.all_reduce(counts)
say(f"accuracy {counts[0] / counts[1]:.4f}: {counts[0]} of {counts[1]}, in a set of {SAMPLES}")
