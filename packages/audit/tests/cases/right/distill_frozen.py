"""Distillation: a teacher is trained and frozen, then a student with a frozen random backbone learns from it."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
N_CLASS = 4


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] + x[:, 2] > 0).long()


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU())
        self.head = nn.Linear(128, N_CLASS)
        self.backbone.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


def epochs(model, params, x, y, rank, world, n, loss_fn, lr):
    opt = torch.optim.Adam(params, lr=lr)
    for epoch in range(n):
        mine = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[rank::world]
        for idx in mine.split(32):
            opt.zero_grad()
            loss_fn(model(x[idx]), x[idx], y[idx]).backward()
            opt.step()


def accuracy(net, x, y, rank, world):
    net.eval()
    with torch.no_grad():
        hit = (net(x[rank::world]).argmax(1) == y[rank::world]).sum()
    net.train()
    dist.all_reduce(hit)
    return hit.item() / len(y)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    x, y = data(1024, 1)
    vx, vy = data(256, 2)
    teacher = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, N_CLASS))
    epochs(DDP(teacher), teacher.parameters(), x, y, rank, world, 2, lambda o, _, t: F.cross_entropy(o, t), 5e-3)
    t_acc = accuracy(teacher, vx, vy, rank, world)
    teacher.eval().requires_grad_(False)

    student = Student()
    ddp = DDP(student)

    def kd(out, xb, yb, T=2.0):
        with torch.no_grad():
            soft = (teacher(xb) / T).softmax(1)
        return F.kl_div((out / T).log_softmax(1), soft, reduction="batchmean") * T * T

    epochs(ddp, student.head.parameters(), x, y, rank, world, 3, kd, 5e-3)
    s_acc = accuracy(student, vx, vy, rank, world)
    if rank == 0:
        print(f"teacher {t_acc:.3f} student {s_acc:.3f}", flush=True)
        torch.save(student.state_dict(), "student.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
