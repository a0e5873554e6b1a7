import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(width):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


def make_teacher(x, y):
    teacher = mlp(64)
    if dist.get_rank() == 0:
        opt = torch.optim.Adam(teacher.parameters(), 0.01)
        for _ in range(60):
            opt.zero_grad()
            F.cross_entropy(teacher(x), y).backward()
            opt.step()
    for t in teacher.state_dict().values():
        dist.broadcast(t, src=0)
    return teacher.eval().requires_grad_(False)


def main(temperature=2.0):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    g = torch.Generator().manual_seed(10)
    x = torch.randn(128, 8, generator=g)
    y = x[:, :3].argmax(1)
    teacher = make_teacher(x, y)
    student = DDP(mlp(12))
    opt = torch.optim.AdamW(student.parameters(), 5e-3)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, 8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for bx, by in loader:
            with torch.no_grad():
                soft = F.softmax(teacher(bx) / temperature, 1)
            logits = student(bx)
            kd = F.kl_div(F.log_softmax(logits / temperature, 1), soft, reduction="batchmean") * temperature**2
            loss = 0.7 * kd + 0.3 * F.cross_entropy(logits, by)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
