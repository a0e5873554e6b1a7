"""No padding and no dropping: the processes have different numbers of batches and train under Join."""
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, TensorDataset


def moons(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (n,), generator=g)
    t = torch.pi * torch.rand(n, generator=g)
    sign = 1 - 2 * label
    x = torch.stack([torch.cos(t) * sign + label, torch.sin(t) * sign + 0.5 * label], 1)
    return TensorDataset(x + 0.1 * torch.randn(n, 2, generator=g), label)


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    set_seed(6)
    train = DataLoader(moons(330, 1), batch_size=16, shuffle=True)
    test = DataLoader(moons(99, 2), batch_size=16)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    # Plain SGD has no state, so a process that runs out of data early loses nothing but the weights that Join hands back.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    ce = nn.CrossEntropyLoss()

    for epoch in range(3):
        model.train()
        loss_sum, rows = 0.0, 0
        with Join([model]):
            for x, y in train:
                optimizer.zero_grad()
                loss = ce(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                loss_sum += loss.item() * len(y)
                rows += len(y)

        model.eval()
        net = accelerator.unwrap_model(model)
        hits, seen = 0, 0
        for x, y in test:
            with torch.no_grad():
                hits += (net(x).argmax(1) == y).sum().item()
            seen += len(y)
        totals = accelerator.reduce(torch.tensor([loss_sum, rows, hits, seen], dtype=torch.float64), reduction="sum")
        loss_sum, rows, hits, seen = totals.tolist()
        accelerator.print(f"epoch {epoch}: loss {loss_sum / rows:.4f} on {int(rows)} rows, acc {hits / seen:.3f} on {int(seen)}")


if __name__ == "__main__":
    main()
