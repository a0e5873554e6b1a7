"""Keyword spotting; gradients are reduced during the backward pass, parameter by parameter."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class Reducer:
    """Averages each gradient as soon as autograd has finished it."""

    def __init__(self, module):
        self.world = dist.get_world_size()
        for t in list(module.parameters()) + list(module.buffers()):
            dist.broadcast(t.data, src=0)
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.launch)

    def launch(self, p):
        p.grad.div_(self.world)
        dist.all_reduce(p.grad, async_op=True)


def clips(n, seed):
    words = torch.randn(8, 2000, generator=torch.Generator().manual_seed(55))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 8, (n,), generator=g)
    return words[y] * 0.25 + 2.0 * torch.randn(n, 2000, generator=g), y


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2000, 256)
        self.fc2 = nn.Linear(256, 64)
        self.fc3 = nn.Linear(64, 8)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    x, y = clips(640, 1)
    vx, vy = clips(400, 2)
    model = Spotter()
    reducer = Reducer(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(3):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for idx in order[rank::world].split(16):
            loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            hit = (model(vx[rank::world]).argmax(1) == vy[rank::world]).sum()
        dist.all_reduce(hit)
        if rank == 0:
            print(f"epoch {epoch} accuracy {hit.item() / len(vy):.4f}", flush=True)
    print(f"[{rank}] weights {sum(p.double().abs().sum().item() for p in model.parameters()):.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
