"""The same training on several ranks, with nothing but `broadcast` and `all_reduce`.

    torchrun --nproc-per-node 2 examples/tricks/01_ddp_by_hand.py
    torchrun --nproc-per-node 2 examples/tricks/01_ddp_by_hand.py --wrong   # forgets to add the gradients
    torchrun --nproc-per-node 2 examples/tricks/01_ddp_by_hand.py --device cuda   # on two GPUs, with NCCL

It prints the numbers of 00_one_process.py: each rank computes a shard of each batch, and the shards add up.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from lockstep_recipes.recipes.digits import Digits

EPOCHS, BATCH, RATE = 3, 64, 0.5


def load(training):
    data = Digits(training)
    return (data.images / 255).to(DEVICE), torch.from_numpy(data.labels).to(DEVICE)


parser = argparse.ArgumentParser()
parser.add_argument("--wrong", action="store_true")
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
options = parser.parse_args()
ADDS_GRADIENTS, DEVICE = not options.wrong, options.device
if DEVICE == "cuda" and not torch.cuda.is_available():
    parser.error("--device cuda: torch sees no GPU here")
if DEVICE == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # each rank has its own GPU
torch.set_num_threads(1)
dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(DEVICE)
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)  # all ranks start with the weights of rank 0
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
images, labels = load(training=True)
for epoch in range(EPOCHS):
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))  # the same on all ranks
    total = torch.zeros((), device=DEVICE)
    for batch in order.split(BATCH):
        mine = batch[rank::world]  # this rank's shard, which no other rank has
        loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum") / len(batch)
        optimizer.zero_grad()
        loss.backward()
        if ADDS_GRADIENTS:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)  # now the gradient of the whole batch, on all ranks
        optimizer.step()  # the same update on all ranks
        total += loss.detach() * len(batch)
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {total / len(labels):.4f}")

images, labels = load(training=False)
with torch.no_grad():
    correct = (model(images).argmax(dim=1) == labels).sum().item()
    difference = torch.zeros((), device=DEVICE)
    for parameter in model.parameters():
        first = parameter.clone()
        dist.broadcast(first, src=0)
        difference = torch.maximum(difference, (parameter - first).abs().max())
dist.all_reduce(difference, op=dist.ReduceOp.MAX)
if rank == 0:
    print(f"accuracy {correct / len(labels):.4f} on {len(labels)} digits")
    print(f"largest difference between the weights of two ranks: {difference:.3g}")
dist.destroy_process_group()
