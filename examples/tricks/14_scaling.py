"""Scaling: the bytes that a step sends do not depend on the batch, and what is not parallel limits the gain.

torchrun --nproc-per-node 2 examples/tricks/14_scaling.py
"""

from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from toy import count_traffic, digits, make_model, say, shuffled, start

rank, world = start()
images, labels = digits()
for size in (64, 512):
    model = DistributedDataParallel(make_model())
    sent, steps = count_traffic(model), 0
    for batch in shuffled(len(labels), epoch=0).split(size):
        mine = batch[rank::world]
        cross_entropy(model(images[mine]), labels[mine]).backward()
        steps += 1
    say(f"batch {size}: {steps} steps, {sum(sent) // steps} bytes per step, {sum(sent)} for the epoch")


def amdahl(ranks, serial):
    """How many times faster `ranks` are than one, if a fraction `serial` of the time is not parallel (Amdahl 1967)."""
    return 1 / (serial + (1 - serial) / ranks)


def ring_s(gradient_bytes, ranks, bytes_per_s):
    """Seconds of a ring all-reduce without latency: each rank sends and receives 2 (ranks - 1) / ranks of the bytes."""
    return 2 * (ranks - 1) / ranks * gradient_bytes / bytes_per_s


for ranks in (8, 64, 512):
    little, much = amdahl(ranks, 0.01), amdahl(ranks, 0.1)
    say(f"{ranks} ranks: {little:.1f} times as fast if 1 % is not parallel, {much:.1f} if 10 %")
for name, bytes_per_s in (("Ethernet, 10 Gbit/s", 1.25e9), ("InfiniBand, 400 Gbit/s", 50e9)):
    say(f"100 million gradients in fp32 over 8 ranks, {name}: {1000 * ring_s(4e8, 8, bytes_per_s):.0f} ms")
