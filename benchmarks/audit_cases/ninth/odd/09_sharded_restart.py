"""FSDP2 autoencoder of gene profiles; every rank writes its own shards, and training goes on from them."""
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GENES, CKPT = 96, "genes_ckpt"


def profiles(n, seed):
    g = torch.Generator().manual_seed(seed)
    loadings = torch.randn(6, GENES, generator=torch.Generator().manual_seed(44))
    return TensorDataset(torch.randn(n, 6, generator=g) @ loadings + 0.3 * torch.randn(n, GENES, generator=g))


class Layer(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.lin = nn.Linear(cin, cout)
        self.norm = nn.LayerNorm(cout)

    def forward(self, x):
        return F.silu(self.norm(self.lin(x)))


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(GENES, 48), Layer(48, 8), Layer(8, 48)])
        self.out = nn.Linear(48, GENES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def build():
    model = AutoEncoder()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def save(model, optimizer):
    """A collective: no rank has the whole model, so all of them write."""
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=CKPT)


def load(model, optimizer):
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=CKPT)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def train(model, optimizer, loader, sampler, epochs):
    rank, world = dist.get_rank(), dist.get_world_size()
    for epoch in epochs:
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for (x,) in loader:
            loss = F.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} reconstruction {stats[0] / stats[1]:.4f} on {world} ranks", flush=True)


def main():
    dist.init_process_group("gloo")
    data = profiles(640, 1)
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    torch.manual_seed(23)
    model, optimizer = build()
    train(model, optimizer, loader, sampler, range(0, 2))
    save(model, optimizer)
    dist.barrier()

    # as after a restart: other start weights, empty optimizer, then the shards are read back
    torch.manual_seed(24)
    model, optimizer = build()
    load(model, optimizer)
    train(model, optimizer, loader, sampler, range(2, 4))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
