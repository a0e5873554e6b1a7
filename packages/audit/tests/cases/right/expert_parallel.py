import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Exchange(torch.autograd.Function):
    """Rows of rank i's j-th part go to rank j; the backward is the same exchange."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out


class ExpertParallel(nn.Module):
    def __init__(self, d, expert_seed):
        super().__init__()
        self.router = nn.Linear(d, dist.get_world_size())
        with torch.random.fork_rng():
            torch.manual_seed(expert_seed)
            self.expert = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def forward(self, x):
        gate = self.router(x).softmax(1)
        world = dist.get_world_size()
        sent = x.repeat(world, 1)  # dense mixture: every expert sees every token
        back = Exchange.apply(self.expert(Exchange.apply(sent))).view(world, *x.shape)
        return x + (gate.T[..., None] * back).sum(0)


class Net(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.inp = nn.Linear(6, d)
        self.moe = ExpertParallel(d, expert_seed=100 + dist.get_rank())
        self.out = nn.Linear(d, 2)

    def forward(self, x):
        return self.out(self.moe(torch.relu(self.inp(x))))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(128, 6, generator=g)
    y = (x[:, 0] * x[:, 1] > 0).long()
    for epoch in range(3):
        for step in torch.randperm(128, generator=torch.Generator().manual_seed(epoch)).split(16 * world):
            mine = step[rank::world]
            loss = F.cross_entropy(net(x[mine]), y[mine])
            opt.zero_grad()
            loss.backward()
            for name, p in net.named_parameters():
                if ".expert." not in name:
                    dist.all_reduce(p.grad)
                p.grad /= world
            opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: {mean.item() / world:.4f}")
    torch.save(net.state_dict(), f"moe-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
