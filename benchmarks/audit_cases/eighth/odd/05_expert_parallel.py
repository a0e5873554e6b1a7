"""Mixture of experts with one expert per rank; the rest of the model is replicated."""
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DIM, EPOCHS = 32, 4


def piecewise(n=2048, seed=14):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    a, b = torch.randn(2, 8, generator=g)
    y = torch.where(x[:, 0] > 0, torch.sin(x @ a), (x @ b).abs())
    return TensorDataset(x, y.unsqueeze(1))


def exchange(x, recv, send):
    return funcol.all_to_all_single_autograd(x, recv, send, dist.group.WORLD)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, DIM)
        self.gate = nn.Linear(DIM, dist.get_world_size())
        self.expert = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        self.out = nn.Linear(DIM, 1)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        probs = self.gate(h).softmax(-1)
        weight, choice = probs.max(-1)
        order = choice.argsort(stable=True)
        send = choice.bincount(minlength=probs.size(1))
        recv = torch.empty_like(send)
        dist.all_to_all_single(recv, send)
        send_list, recv_list = send.tolist(), recv.tolist()

        tokens = exchange(h[order], recv_list, send_list)
        done = exchange(self.expert(tokens), send_list, recv_list)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        h = h + weight.unsqueeze(1) * done[back]

        share = send / send.sum()
        balance = probs.size(1) * (share * probs.mean(0)).sum()
        return self.out(h), balance


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = piecewise()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=64, sampler=sampler, drop_last=True)

    torch.manual_seed(30 + rank)
    net = MoE()
    # every rank owns its expert: it is neither broadcast nor reduced
    own = [f"expert.{name}" for name, _ in net.expert.named_parameters()]
    DDP._set_params_and_buffers_to_ignore_for_model(net, own)
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            pred, balance = model(x)
            mse = F.mse_loss(pred, y)
            optimizer.zero_grad()
            (mse + 0.01 * balance).backward()
            # an expert sees the tokens of all ranks, whose losses are means per rank
            for p in net.expert.parameters():
                p.grad.div_(world)
            optimizer.step()
            total += torch.tensor([mse.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: mse {total[0] / total[1]:.4f}")

    torch.save(net.expert.state_dict(), f"expert_{rank}.pt")
    if rank == 0:
        torch.save({k: v for k, v in net.state_dict().items() if not k.startswith("expert.")}, "shared.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
