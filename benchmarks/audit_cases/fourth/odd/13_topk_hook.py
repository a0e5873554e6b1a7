"""DDP communication hook: each rank sends the top 10% of its gradient entries and keeps the rest for the next step."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


class TopK:
    def __init__(self, share):
        self.share, self.rest = share, {}

    def __call__(self, state, bucket):
        world = dist.get_world_size()
        g = bucket.buffer()
        i = bucket.index()
        if i not in self.rest or self.rest[i].shape != g.shape:
            self.rest[i] = torch.zeros_like(g)
        g = g + self.rest[i]
        k = max(1, int(self.share * g.numel()))
        at = g.abs().topk(k).indices
        val = g[at]
        self.rest[i] = g.clone()
        self.rest[i][at] = 0
        ats, vals = [torch.empty_like(at) for _ in range(world)], [torch.empty_like(val) for _ in range(world)]
        dist.all_gather(ats, at)
        dist.all_gather(vals, val)
        out = torch.zeros_like(g)
        for a, v in zip(ats, vals):
            out.index_add_(0, a, v / world)
        fut = torch.futures.Future()
        fut.set_result(out)
        return fut


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    centre = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centre[y] + torch.randn(n, 20, generator=g), y)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    train, val = data(1024, 1), data(200, 2)
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, 32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)))
    model.register_comm_hook(None, TopK(0.1).__call__)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        x, y = val[rank::world]
        with torch.no_grad():
            hit = (model.module(x).argmax(1) == y).sum()
        dist.all_reduce(hit)
        if rank == 0:
            print(f"epoch {epoch} accuracy {hit.item() / len(val):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
