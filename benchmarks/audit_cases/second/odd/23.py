import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUM = 3


class Mixer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.fc = nn.Linear(d, d)

    def forward(self, x):
        return x + F.gelu(self.fc(self.norm(x)))


class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.inp = nn.Linear(10, d)
        self.mix = nn.ModuleList(Mixer(d) for _ in range(3))
        self.out = nn.Linear(d, 5)

    def forward(self, x):
        x = self.inp(x)
        for m in self.mix:
            x = m(x)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(560, 10)
    data = TensorDataset(x, (x @ torch.randn(10, 5)).argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)  # 14 micro-batches: the last group has two

    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for m in model.mix:
        fully_shard(m, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    n = len(loader)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for i, (xb, yb) in enumerate(loader):
            group = min(ACCUM, n - i // ACCUM * ACCUM)
            update = (i + 1) % ACCUM == 0 or i + 1 == n
            model.set_requires_gradient_sync(update)
            loss = F.cross_entropy(model(xb).float(), yb)
            (loss / group).backward()
            if update:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total.item() / n / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
