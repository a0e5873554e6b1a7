"""The order and the random numbers of samples are functions of (seed, epoch, sample), and not of the rank.

    torchrun --nproc-per-node 2 examples/tricks/11_order_and_seeds.py
    ... --wrong seeds   # each rank draws its own noise
    ... --wrong order   # each rank shuffles its own shard

Each rank also trains by itself, with all samples. Its weights should equal those of the ranks together.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from toy import deviation, digits, flat, make_model, mistake, place, say, shuffled, start

SEED, BATCH, EPOCHS = 7, 64, 2

wrong = mistake("seeds", "order")
rank, world = start()
images, labels = digits()


def prepare(number, epoch, stream):
    """An image with noise: the same noise on every rank and process, and after every restart."""
    own = torch.Generator().manual_seed((SEED * 1000 + epoch) * len(labels) + number)
    noise = torch.randn(1, 8, 8, generator=stream if wrong == "seeds" else own)  # on the CPU: the same for every device
    return images[number] + 0.2 * noise.to(place())


def parts(epoch, rank, world):
    """The samples of this rank for each step of an epoch, and the number of samples of all ranks."""
    if wrong == "order":
        own = torch.arange(rank, len(labels), world)
        own = own[shuffled(len(own), SEED * 1000 + epoch)]
        return [(part.tolist(), len(part) * world) for part in own.split(BATCH // world)]
    order = shuffled(len(labels), SEED * 1000 + epoch)
    return [(batch[rank::world].tolist(), len(batch)) for batch in order.split(BATCH)]


def train(rank, world):
    model, stream = make_model(), torch.Generator().manual_seed(SEED + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        for mine, whole in parts(epoch, rank, world):
            inputs = torch.stack([prepare(number, epoch, stream) for number in mine])
            optimizer.zero_grad()
            (cross_entropy(model(inputs), labels[mine], reduction="sum") / whole).backward()
            if world > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
    return flat(model.parameters())


say(f"deviation of {world} ranks from one rank: {deviation(train(rank, world), train(0, 1)):.3g}")
