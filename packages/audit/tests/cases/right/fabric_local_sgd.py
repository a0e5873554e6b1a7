"""Local SGD with Fabric: ranks take several steps on their own, then the weights are averaged."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fabric import Fabric

LOCAL_STEPS = 4


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    r = 0.2 + torch.rand(n, generator=g)
    a = 5.0 * r + 3.1416 * y
    x = torch.stack([r * a.cos(), r * a.sin()], dim=1) + 0.03 * torch.randn(n, 2, generator=g)
    return TensorDataset(x, y)


@torch.no_grad()
def average_weights(fabric, model):
    for p in model.parameters():
        p.copy_(fabric.all_reduce(p.detach().clone(), reduce_op="mean"))


@torch.no_grad()
def accuracy(fabric, model, loader):
    model.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    counts = fabric.all_reduce(counts, reduce_op="sum")
    model.train()
    return (counts[0] / counts[1]).item()


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(17)

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = fabric.setup(model, optimizer)
    train = fabric.setup_dataloaders(DataLoader(spirals(1024, 1), batch_size=16, shuffle=True))
    test = fabric.setup_dataloaders(DataLoader(spirals(256, 2), batch_size=64))

    step = 0
    for epoch in range(4):
        for x, y in train:
            with fabric.no_backward_sync(model):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % LOCAL_STEPS == 0:
                average_weights(fabric, model)
        average_weights(fabric, model)
        fabric.print(f"epoch {epoch}: accuracy {accuracy(fabric, model, test):.4f}")


if __name__ == "__main__":
    main()
