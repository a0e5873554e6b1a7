"""Self-distillation without labels: a student follows a slow teacher on two views of each sample,
with a running centre of the teacher outputs."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TwoViews(Dataset):
    def __init__(self, n, views):
        g = torch.Generator().manual_seed(33)
        means = 2 * torch.randn(6, 20, generator=g)
        self.kind = torch.randint(0, 6, (n,), generator=g)
        self.x = means[self.kind] + 0.5 * torch.randn(n, 20, generator=g)
        self.views = views

    def __len__(self):
        return len(self.x)

    def _view(self, x):
        keep = (torch.rand(20, generator=self.views) > 0.2).float()
        return x * keep + 0.1 * torch.randn(20, generator=self.views)

    def __getitem__(self, i):
        return self._view(self.x[i]), self._view(self.x[i])


class Projector(nn.Module):
    def __init__(self, out=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, out, bias=False)

    def forward(self, x):
        return self.head(F.normalize(self.trunk(x), dim=-1))


def distill(student_out, teacher_out, centre):
    target = F.softmax((teacher_out - centre) / 0.06, dim=-1)
    return -(target * F.log_softmax(student_out / 0.1, dim=-1)).sum(-1).mean()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    student = DDP(Projector())
    teacher = copy.deepcopy(student.module).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)

    data = TwoViews(1280, torch.Generator().manual_seed(70 + rank))
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=64, sampler=sampler, drop_last=True)
    centre = torch.zeros(16)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for a, b in loader:
            out = student(torch.cat([a, b]))
            with torch.no_grad():
                ref = teacher(torch.cat([a, b]))
            sa, sb = out.chunk(2)
            ta, tb = ref.chunk(2)
            loss = (distill(sa, tb, centre) + distill(sb, ta, centre)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            with torch.no_grad():
                for p_t, p_s in zip(teacher.parameters(), student.module.parameters()):
                    p_t.mul_(0.98).add_(p_s, alpha=0.02)
                batch_centre = ref.mean(0)
                dist.all_reduce(batch_centre)
                centre.mul_(0.9).add_(batch_centre / world, alpha=0.1)
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}  |centre| {centre.norm():.3f}")

    if rank == 0:
        torch.save({"teacher": teacher.state_dict(), "centre": centre}, "teacher.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
