"""Mixture of experts with one expert per rank: tokens travel by all_to_all, experts stay out of DDP."""
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
CAP = 24                                          # places per expert and rank


class Expert(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        return self.f(x)


class MoE(nn.Module):
    def __init__(self, d, rank, world):
        super().__init__()
        self.world, self.gate = world, nn.Linear(d, world)
        torch.manual_seed(300 + rank)
        self.expert = Expert(d)

    def forward(self, x):
        prob, which = self.gate(x).softmax(1).max(1)
        slots = x.new_zeros(self.world * CAP, x.shape[1])
        place = torch.full_like(which, -1)
        for e in range(self.world):
            at = (which == e).nonzero()[:CAP, 0]
            place[at] = e * CAP + torch.arange(len(at))
        kept = place >= 0
        slots = slots.index_put((place[kept],), x[kept])
        there = dist_nn.all_to_all_single(torch.empty_like(slots), slots)
        back = self.expert(there)
        back = dist_nn.all_to_all_single(torch.empty_like(back), back)
        out = torch.zeros_like(x).index_put((kept.nonzero()[:, 0],), back[place[kept]])
        return x + prob[:, None] * out


class Net(nn.Module):
    def __init__(self, rank, world, d=16):
        super().__init__()
        self.inp, self.out = nn.Linear(8, d), nn.Linear(d, 3)
        self.moe = MoE(d, rank, world)

    def forward(self, x):
        return self.out(self.moe(self.inp(x)))


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return x, torch.bucketize(x[:, 0] * x[:, 1].sign() + 0.5 * x[:, 2], torch.tensor([-0.5, 0.5]))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net(rank, world)
    local = [n for n, _ in net.named_parameters() if ".expert." in n]
    DDP._set_params_and_buffers_to_ignore_for_model(net, local)
    model = DDP(net)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    x, y = data(1280, 1)
    vx, vy = data(320, 2)
    for epoch in range(3):
        mine = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[rank::world]
        for idx in mine.split(32):
            opt.zero_grad()
            F.cross_entropy(model(x[idx]), y[idx]).backward()
            for p in net.moe.expert.parameters():
                p.grad /= world                   # it got the gradients of all ranks' tokens, as a sum
            opt.step()
        with torch.no_grad():
            hit = torch.zeros(())
            for idx in torch.arange(rank, len(vx), world).split(32):
                hit += (net(vx[idx]).argmax(1) == vy[idx]).sum()
        dist.all_reduce(hit)
        if rank == 0:
            print(f"epoch {epoch} accuracy {hit.item() / len(vy):.4f}", flush=True)
    torch.save(net.moe.expert.state_dict(), f"expert{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
