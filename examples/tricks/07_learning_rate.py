"""A batch k times as large: a learning rate k times as high, and a warm-up.

torchrun --nproc-per-node 2 examples/tricks/07_learning_rate.py
torchrun --nproc-per-node 2 examples/tricks/07_learning_rate.py --wrong unscaled    # keeps the rate of the small batch
torchrun --nproc-per-node 2 examples/tricks/07_learning_rate.py --wrong no_warmup   # starts with the full rate
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from toy import accuracy, digits, make_model, mistake, say, shuffled, start

BATCH, RATE, FACTOR = 32, 0.05, 8

wrong = mistake("unscaled", "no_warmup")
rank, world = start()
images, labels = digits()


def train(size, peak, warm_up):
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9)
    step, worst = 0, 0.0
    for epoch in range(5):
        for batch in shuffled(len(labels), epoch).split(size):
            step += 1  # counts optimizer steps, not micro-batches or ranks
            optimizer.param_groups[0]["lr"] = peak * min(1.0, step / warm_up)
            mine = batch[rank::world]
            optimizer.zero_grad()
            loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum") * world / len(batch)
            loss.backward()
            optimizer.step()
            total = loss.detach() / world
            dist.all_reduce(total)
            worst = max(worst, total.item())
    say(
        f"batch {size}, rate {peak:g}, warm-up {warm_up}: {step} updates, highest loss {worst:.2f}, "
        f"accuracy {accuracy(model):.4f}"
    )


train(BATCH, RATE, warm_up=1)
train(FACTOR * BATCH, RATE if wrong == "unscaled" else FACTOR * RATE, warm_up=1 if wrong == "no_warmup" else 15)
