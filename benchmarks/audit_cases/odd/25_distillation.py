import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_teacher():
    with torch.random.fork_rng():
        torch.manual_seed(123)
        return nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 5)).eval().requires_grad_(False)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    teacher = make_teacher()
    student = DDP(nn.Linear(10, 5))
    opt = torch.optim.Adam(student.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(512, 10, generator=torch.Generator().manual_seed(4)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            with torch.no_grad():
                target = F.softmax(teacher(x) / 2, 1)
            loss = F.kl_div(F.log_softmax(student(x) / 2, 1), target, reduction="batchmean") * 4
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} KL on rank 0 {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
