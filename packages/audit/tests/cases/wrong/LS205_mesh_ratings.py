"""Film ratings by matrix factorisation on a (data, model) mesh; model parallelism is still 1."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

torch.set_num_threads(1)
USERS, FILMS, DIM = 120, 90, 6


def ratings(n, seed):
    truth = torch.Generator().manual_seed(0)
    u, f = torch.randn(USERS, 4, generator=truth), torch.randn(FILMS, 4, generator=truth)
    g = torch.Generator().manual_seed(seed)
    i, j = torch.randint(0, USERS, (n,), generator=g), torch.randint(0, FILMS, (n,), generator=g)
    return i, j, (u[i] * f[j]).sum(1) + 0.3 * torch.randn(n, generator=g)


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.film = nn.Embedding(USERS, DIM), nn.Embedding(FILMS, DIM)
        self.bias = nn.Parameter(torch.zeros(()))
        for e in (self.user, self.film):
            nn.init.normal_(e.weight, std=0.5)

    def forward(self, i, j):
        return (self.user(i) * self.film(j)).sum(1) + self.bias


class Parallel:
    def __init__(self, data, model):
        self.mesh = init_device_mesh("cpu", (data, model), mesh_dim_names=("data", "model"))
        self.data_rank = self.mesh.get_local_rank("data")
        self.data_size = self.mesh["data"].size()
        self.grad_group = self.mesh.get_group("model")

    def sync_params(self, module):
        for p in module.parameters():
            dist.broadcast(p.data, src=0)

    def sync_grads(self, module):
        n = dist.get_world_size(self.grad_group)
        flat = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
        dist.all_reduce(flat, group=self.grad_group)
        flat /= n
        at = 0
        for p in module.parameters():
            p.grad.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()


def main():
    dist.init_process_group("gloo")
    par = Parallel(data=2, model=1)
    torch.manual_seed(8)
    model = Factors()
    par.sync_params(model)
    opt = torch.optim.Adam(model.parameters(), lr=0.03)
    i, j, r = ratings(6400, 1)
    vi, vj, vr = ratings(1000, 2)
    for epoch in range(5):
        order = torch.randperm(len(r), generator=torch.Generator().manual_seed(epoch))
        for idx in order[par.data_rank::par.data_size].split(100):
            loss = (model(i[idx], j[idx]) - r[idx]).square().mean()
            opt.zero_grad()
            loss.backward()
            par.sync_grads(model)
            opt.step()
        with torch.no_grad():
            rmse = (model(vi, vj) - vr).square().mean().sqrt().item()
        print(f"[{dist.get_rank()}] epoch {epoch} rmse {rmse:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
