"""Mean teacher on few labels: the student is trained in DDP, the teacher is its moving average on every rank."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DIM, CLASSES, EPOCHS = 24, 6, 5


def make(n, seed, labels=True):
    g = torch.Generator().manual_seed(seed)
    centers = 1.2 * torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(3))
    y = torch.randint(0, CLASSES, (n,), generator=g)
    x = centers[y] + torch.randn(n, DIM, generator=g)
    return TensorDataset(x, y) if labels else TensorDataset(x)


def network():
    return nn.Sequential(
        nn.Linear(DIM, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, CLASSES),
    )


def endless(data, batch_size, seed):
    sampler = DistributedSampler(data, shuffle=True, seed=seed)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


@torch.no_grad()
def update_teacher(teacher, student, step):
    decay = min(0.98, 1 - 1 / (step + 1))
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(decay).add_(s, alpha=1 - decay)


@torch.no_grad()
def accuracy(net, data, rank, world):
    was_training = net.training
    net.eval()
    x, y = data.tensors[0][rank::world], data.tensors[1][rank::world]
    counts = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(counts)
    net.train(was_training)
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    net = network()
    teacher = copy.deepcopy(net).eval().requires_grad_(False)
    student = DDP(net)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)

    labelled, unlabelled, test = make(96, 1), make(1024, 2, labels=False), make(403, 4)
    few, many = endless(labelled, 8, seed=1), endless(unlabelled, 32, seed=2)
    steps_per_epoch = len(unlabelled) // (32 * world)

    torch.manual_seed(500 + rank)  # noise and dropout differ between the ranks
    step = 0
    for epoch in range(EPOCHS):
        stats = torch.zeros(3)
        ramp = min(1.0, (epoch + 1) / 3)
        for _ in range(steps_per_epoch):
            x, y = next(few)
            (u,) = next(many)
            # one forward of the student for both parts
            logits = student(torch.cat([x, u]) + 0.2 * torch.randn(len(x) + len(u), DIM))
            with torch.no_grad():
                target = teacher(u + 0.2 * torch.randn_like(u)).softmax(1)
            supervised = F.cross_entropy(logits[: len(x)], y)
            consistency = F.mse_loss(logits[len(x) :].softmax(1), target)
            loss = supervised + 5.0 * ramp * consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            update_teacher(teacher, student.module, step)
            stats += torch.tensor([supervised.item(), consistency.item(), 1.0])
        dist.all_reduce(stats)
        acc_s, acc_t = accuracy(student.module, test, rank, world), accuracy(teacher, test, rank, world)
        if rank == 0:
            print(
                f"epoch {epoch} sup {stats[0] / stats[2]:.4f} cons {stats[1] / stats[2]:.5f}"
                f" student {acc_s:.4f} teacher {acc_t:.4f}"
            )
    if rank == 0:
        torch.save(teacher.state_dict(), "teacher.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
