"""Local SGD with Fabric: every process walks on its own for a few steps, then the weights are averaged."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

LOCAL_STEPS = 8
EPOCHS = 3


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 3, (n,), generator=g)
    r = 0.1 + 0.9 * torch.rand(n, generator=g)
    angle = 4 * r + label * 2.094 + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * angle.cos(), r * angle.sin()], 1), label)


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
    model.train()
    counts = fabric.all_reduce(counts, reduce_op="sum")
    return (counts[0] / counts[1]).item()


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(31)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    model, optimizer = fabric.setup(net, optimizer)
    train, test = fabric.setup_dataloaders(
        DataLoader(spirals(2048, 1), batch_size=16, shuffle=True),
        DataLoader(spirals(512, 2), batch_size=64),
    )

    step = 0
    for epoch in range(EPOCHS):
        for x, y in train:
            with fabric.no_backward_sync(model):
                loss = F.cross_entropy(model(x), y)
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
