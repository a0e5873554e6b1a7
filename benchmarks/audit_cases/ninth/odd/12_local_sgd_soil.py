"""Soil type classification with local SGD: each rank trains alone, weights are averaged every 8 steps."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SYNC_EVERY = 8
CLASSES = 5


def make_soil(n, seed):
    centres = torch.randn(CLASSES, 12, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    x = centres[y] + 1.1 * torch.randn(n, 12, generator=g)
    return x, y


def average(model, optimizer):
    """Mean of the weights and of the momentum over the ranks."""
    world = dist.get_world_size()
    with torch.no_grad():
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data.div_(world)
            momentum = optimizer.state[p].get("momentum_buffer")
            if momentum is not None:
                dist.all_reduce(momentum)
                momentum.div_(world)


@torch.no_grad()
def evaluate(model, x, y, rank, world):
    """Each rank scores every world-th row, each row once."""
    model.eval()
    hits = (model(x[rank::world]).argmax(1) == y[rank::world]).sum()
    dist.all_reduce(hits)
    model.train()
    return hits.item() / len(y)


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(6)
    rank, world = fabric.global_rank, fabric.world_size

    # not given to fabric.setup on purpose: no gradient is exchanged between two averages
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    train = DataLoader(TensorDataset(*make_soil(2048, 0)), batch_size=32, shuffle=True, drop_last=True)
    train = fabric.setup_dataloaders(train)
    x_val, y_val = make_soil(401, 1)

    step = 0
    for epoch in range(5):
        total = torch.zeros(())
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            step += 1
            if step % SYNC_EVERY == 0:
                average(model, optimizer)
        if step % SYNC_EVERY != 0:
            average(model, optimizer)
        dist.all_reduce(total)
        acc = evaluate(model, x_val, y_val, rank, world)
        fabric.print(f"epoch {epoch} loss {total.item() / world / len(train):.4f} val acc {acc:.3f}")

    if rank == 0:
        torch.save(model.state_dict(), "soil.pt")
    fabric.barrier()


if __name__ == "__main__":
    main()
