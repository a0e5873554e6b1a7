"""Small residual MLP classifier, split over two ranks with tensor parallelism."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

DIM, CLASSES, EPOCHS = 48, 5, 3


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    centres = 1.2 * torch.randn(CLASSES, 20, generator=torch.Generator().manual_seed(77))
    y = torch.randint(0, CLASSES, (n,), generator=g)
    return TensorDataset(centres[y] + torch.randn(n, 20, generator=g), y)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(20, DIM)
        self.layers = nn.ModuleList(FeedForward() for _ in range(2))
        self.out = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@torch.no_grad()
def accuracy(model, loader):
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return hits / len(loader.dataset)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    # one model, cut in two: the ranks of the tp mesh work on the same batch
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    order = torch.Generator().manual_seed(123)
    train_loader = DataLoader(blobs(1024, 1), batch_size=64, shuffle=True, generator=order)
    val_loader = DataLoader(blobs(256, 2), batch_size=128)

    for epoch in range(EPOCHS):
        total, steps = 0.0, 0
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        acc = accuracy(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {total / steps:.4f} val acc {acc:.3f}")

    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save(state, "tp_full.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
