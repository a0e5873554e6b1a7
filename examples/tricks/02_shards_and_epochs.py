"""Each sample goes to one rank, and each epoch has a different order.

torchrun --nproc-per-node 2 examples/tricks/02_shards_and_epochs.py
torchrun --nproc-per-node 2 examples/tricks/02_shards_and_epochs.py --wrong set_epoch   # each epoch has the same order
torchrun --nproc-per-node 2 examples/tricks/02_shards_and_epochs.py --wrong sampler     # all ranks have all samples
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from toy import accuracy, digits, make_model, mistake, say, start

wrong = mistake("set_epoch", "sampler")
rank, world = start()
images, labels = digits()
data = TensorDataset(torch.arange(len(labels)), images, labels)
sampler = DistributedSampler(data, world, rank)
if wrong == "sampler":
    loader = DataLoader(data, 64 // world, shuffle=True)
else:
    loader = DataLoader(data, 64 // world, sampler=sampler)
model = DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
orders = []
for epoch in range(3):
    if wrong != "set_epoch":
        sampler.set_epoch(epoch)
    orders.append([])
    for numbers, inputs, targets in loader:
        orders[-1] += numbers.tolist()
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()  # DDP averages the gradients in here
        optimizer.step()

of_rank = [None] * world
dist.all_gather_object(of_rank, orders[0])
same = sum(first == second for first, second in zip(orders[0], orders[1], strict=True))
say(f"steps of an epoch: {len(loader)}")
say(f"samples of epoch 1 on every rank: {len(set.intersection(*map(set, of_rank)))} of {len(data)}")
say(f"positions with the same sample in epochs 1 and 2: {same} of {len(orders[0])}")
say(f"accuracy {accuracy(model):.4f}")
