"""Data parallel SGD written by hand, after the 'Writing Distributed Applications' tutorial."""
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Partition:
    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        return self.data[self.index[i]]


class DataPartitioner:
    def __init__(self, data, sizes, seed=1234):
        self.data, self.partitions = data, []
        rng = random.Random(seed)
        indexes = list(range(len(data)))
        rng.shuffle(indexes)
        for frac in sizes:
            part = int(frac * len(data))
            self.partitions.append(indexes[:part])
            indexes = indexes[part:]

    def use(self, partition):
        return Partition(self.data, self.partitions[partition])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 40)
        self.fc2 = nn.Linear(40, 4)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def toy_digits():
    g = torch.Generator().manual_seed(8)
    x = torch.randn(400, 10, generator=g)
    y = x[:, :4].argmax(1)
    return [(x[i], y[i]) for i in range(400)]


def partition_dataset():
    data = toy_digits()
    size = dist.get_world_size()
    bsz = 40 // size
    part = DataPartitioner(data, [1.0 / size] * size).use(dist.get_rank())
    g = torch.Generator().manual_seed(dist.get_rank())
    return torch.utils.data.DataLoader(part, batch_size=bsz, shuffle=True, generator=g), bsz


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)


def run():
    torch.manual_seed(1234)
    train_set, bsz = partition_dataset()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(4):
        epoch_loss = 0.0
        for data, target in train_set:
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print("Rank", dist.get_rank(), ", epoch", epoch, ":", epoch_loss / len(train_set))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()
