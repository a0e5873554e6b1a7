"""FSDP2 denoiser with frozen random features, an average of the weights and checkpoints per rank."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, RESTART_AT, DECAY = 6, 3, 0.9


def signals(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 32)
    freq = 1 + 4 * torch.rand(n, 1, generator=g)
    return TensorDataset(torch.sin(6.28 * (freq * t + torch.rand(n, 1, generator=g))))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(32, 128)
        self.body = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.out = nn.Linear(128, 32)
        nn.init.normal_(self.features.weight, std=0.2)
        nn.init.uniform_(self.features.bias, 0, 6.28)
        self.features.requires_grad_(False)

    def forward(self, x):
        return self.out(self.body(torch.cos(self.features(x))))


def build(mesh):
    torch.manual_seed(40)
    model = Denoiser()
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)


def local(model):
    return {n: p.detach().to_local() for n, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def evaluate(model, shadow, loader, noise):
    kept = {n: p.clone() for n, p in local(model).items()}
    for n, p in local(model).items():
        p.copy_(shadow[n])
    sums = torch.zeros(2)
    for (clean,) in loader:
        noisy = clean + 0.4 * torch.randn(clean.shape, generator=noise)
        sums += torch.tensor([(model(noisy) - clean).pow(2).sum().item(), float(clean.numel())])
    for n, p in local(model).items():
        p.copy_(kept[n])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model, optimizer = build(mesh)
    shadow = {n: p.clone() for n, p in local(model).items()}
    noise = torch.Generator().manual_seed(300 + rank)

    train, val = signals(1024, 0), signals(256, 1)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    val_loader = DataLoader(TensorDataset(val.tensors[0][rank::world]), batch_size=64)

    for epoch in range(EPOCHS):
        if epoch == RESTART_AT:
            # start again from the shards that this rank wrote
            model, optimizer = build(mesh)
            saved = torch.load(f"shard_{rank}.pt")
            with torch.no_grad():
                for n, p in local(model).items():
                    p.copy_(saved["model"][n])
            names = [n for n, p in model.named_parameters() if p.requires_grad]
            params = [p for p in model.parameters() if p.requires_grad]
            for n, p in zip(names, params):
                step, m, v = saved["adam"][n]
                blank = torch.zeros_like(p)
                optimizer.state[p] = {"step": step, "exp_avg": blank, "exp_avg_sq": blank.clone()}
                optimizer.state[p]["exp_avg"].to_local().copy_(m)
                optimizer.state[p]["exp_avg_sq"].to_local().copy_(v)
            shadow = saved["shadow"]
            noise.set_state(saved["noise"])

        sampler.set_epoch(epoch)
        for (clean,) in loader:
            noisy = clean + 0.4 * torch.randn(clean.shape, generator=noise)
            loss = (model(noisy) - clean).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for n, p in local(model).items():
                shadow[n].mul_(DECAY).add_(p, alpha=1 - DECAY)
        mse = evaluate(model, shadow, val_loader, noise)
        if rank == 0:
            print(f"epoch {epoch}: averaged weights, val mse {mse:.4f}")

        adam = {}
        for n, p in model.named_parameters():
            if p.requires_grad:
                s = optimizer.state[p]
                adam[n] = (s["step"], s["exp_avg"].to_local(), s["exp_avg_sq"].to_local())
        torch.save({"model": local(model), "shadow": shadow, "adam": adam, "noise": noise.get_state()}, f"shard_{rank}.pt")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
