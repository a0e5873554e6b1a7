"""Mixture of experts with one expert per process: tokens travel to the expert that the gate picked and back."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Exchange(torch.autograd.Function):
    """Rows go to other ranks; the gradients come back the same way."""

    @staticmethod
    def forward(ctx, rows, send, recv):
        ctx.send, ctx.recv = send, recv
        out = rows.new_empty(sum(recv), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.recv)
        return out, None, None


class Shared(nn.Module):
    def __init__(self, d=24, experts=2):
        super().__init__()
        self.inp, self.gate, self.out = nn.Linear(10, d), nn.Linear(d, experts), nn.Linear(d, 1)


def moe_forward(shared, expert, x, world):
    h = torch.tanh(shared.inp(x))
    prob = F.softmax(shared.gate(h), dim=-1)
    weight, choice = prob.max(dim=-1)
    order = choice.argsort(stable=True)
    send = torch.bincount(choice, minlength=world)
    recv = torch.empty_like(send)
    dist.all_to_all_single(recv, send)
    send, recv = send.tolist(), recv.tolist()
    arrived = Exchange.apply(h[order], send, recv)
    returned = Exchange.apply(expert(arrived), recv, send)
    mixed = torch.zeros_like(h).index_copy(0, order, returned)
    y = shared.out(h + weight.unsqueeze(-1) * mixed)
    load = F.one_hot(choice, world).float().mean(0)
    return y, world * (load * prob.mean(0)).sum()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    shared = Shared(experts=world)
    torch.manual_seed(100 + rank)
    expert = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24))
    optimizer = torch.optim.Adam([*shared.parameters(), *expert.parameters()], lr=3e-3)

    g = torch.Generator().manual_seed(5)
    x = torch.randn(1600, 10, generator=g)
    y = torch.where(x[:, :1] > 0, x[:, 1:2] * x[:, 2:3], (x[:, 3:4] + x[:, 4:5]).abs())
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=40, sampler=sampler, drop_last=True)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for xb, yb in loader:
            pred, balance = moe_forward(shared, expert, xb, world)
            loss = F.mse_loss(pred, yb) + 0.01 * balance
            optimizer.zero_grad()
            loss.backward()
            for p in shared.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            for p in expert.parameters():
                p.grad /= world
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f}", flush=True)

    torch.save(expert.state_dict(), f"expert_{rank}.pt")
    if rank == 0:
        torch.save(shared.state_dict(), "shared.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
