"""Details of the lines around a step: sampler and loader, the first batch, empty tensors, gradients of zero, the rate.

torchrun --nproc-per-node 2 examples/tricks/20_details.py
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from toy import place, say, start

rank, world = start()


class Squares(Dataset):
    """The squares of 0 to 7. Notes which samples are read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.read.append(index)
        return index * index


def on_ranks(value):
    values = [None] * world
    dist.all_gather_object(values, value)
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))


# The sampler draws numbers of samples, and the loader reads these samples from the data set.
data = Squares()
sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=2)
drawn = list(sampler)
samples_of_draw = data.read[:]
batches = [batch.tolist() for batch in DataLoader(data, batch_size=2, sampler=sampler)]
say(f"the sampler draws {on_ranks(drawn)}, and reads {samples_of_draw}")
say(f"the loader reads {on_ranks(data.read)}")
say(f"its batches are {on_ranks(batches)}")

# iter() starts a new epoch each time.
torch.manual_seed(0)
shuffled = DataLoader(data, batch_size=2, shuffle=True)
say(f"next(iter(loader)), four times: {[next(iter(shuffled)).tolist() for _ in range(4)]}")
batches = iter(shuffled)
say(f"next(batches), four times:      {[next(batches).tolist() for _ in range(4)]}")

# A rank that receives first makes a tensor of the right shape and type. Its content does not matter.
message = torch.tensor([[1.0, 2.0, 3.0]]).to(place())
shape = torch.tensor(message.shape if rank == 0 else [0, 0]).to(place())
dist.broadcast(shape, src=0)
message = message if rank == 0 else torch.empty(shape.tolist(), device=place())
dist.broadcast(message, src=0)
say(f"received: {on_ranks(message.tolist())}")


def updated(gradient):
    """A weight of 1 after an update, at a rate of 0.1, with a weight decay of 0.5."""
    weight = torch.nn.Parameter(torch.ones(()))
    weight.grad = gradient
    torch.optim.SGD([weight], lr=0.1, weight_decay=0.5).step()
    return weight.item()


say(f"weight 1 after an update with gradient 0: {updated(torch.zeros(())):.2f}, without a gradient: {updated(None):g}")


def rates(micro_batches=1):
    """The rates of three updates, if the scheduler advances with each micro-batch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.8)
    scheduler, used = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5), []
    for _ in range(3):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for _ in range(micro_batches):
            scheduler.step()
    return [round(rate, 4) for rate in used]


say(f"rates if the scheduler advances with each update: {rates()}, with each of two micro-batches: {rates(2)}")
