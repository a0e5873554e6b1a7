"""FSDP2 with different settings per part, and one parameter that is left out and averaged by hand."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

torch.set_num_threads(1)


class Mixer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.inp = nn.Linear(10, d)
        self.blocks = nn.ModuleList(Mixer(d) for _ in range(3))
        self.out = nn.Linear(d, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x) * self.temperature


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return x, (x[:, 0] > 0).long() * 2 + (x[:, 1] * x[:, 2] > 0).long()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = Net()
    fully_shard(model.blocks[0], reshard_after_forward=False)
    fully_shard(model.blocks[1], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                                                               output_dtype=torch.float32))
    fully_shard(model.blocks[2], shard_placement_fn=lambda p: Shard(p.ndim - 1))
    fully_shard(model, ignored_params={model.temperature})
    sharded = [p for p in model.parameters() if p is not model.temperature]
    opt = torch.optim.AdamW([{"params": sharded, "lr": 5e-3},
                             {"params": [model.temperature], "lr": 1e-2, "weight_decay": 0.0}])
    x, y = data(1024, 1)
    vx, vy = data(256, 2)
    for epoch in range(3):
        mine = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[rank::world]
        for idx in mine.split(32):
            loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            dist.all_reduce(model.temperature.grad)
            model.temperature.grad /= world
            nn.utils.clip_grad_norm_(sharded, 1.0)
            opt.step()
        with torch.no_grad():
            hit = (model(vx[rank::world]).argmax(1) == vy[rank::world]).sum()
        dist.all_reduce(hit)
        if rank == 0:
            print(f"epoch {epoch} acc {hit.item() / len(vy):.4f} t {model.temperature.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
