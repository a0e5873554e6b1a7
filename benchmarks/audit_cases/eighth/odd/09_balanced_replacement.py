"""Fault diagnosis with few examples of the bad classes; balanced draws with replacement."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

CLASSES = 4
EPOCHS = 4


def vibrations(n, seed, skew=(0.85, 0.08, 0.05, 0.02)):
    g = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor(skew), n, replacement=True, generator=g)
    t = torch.linspace(0, 1, 64)
    freq = torch.tensor([3.0, 5.0, 8.0, 12.0])[y].unsqueeze(1)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    return TensorDataset(torch.sin(6.28 * freq * t + phase) + 0.6 * torch.randn(n, 64, generator=g), y)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)

    train, val = vibrations(2400, 0), vibrations(1200, 1)
    y = train.tensors[1]
    weights = (1.0 / y.bincount(minlength=CLASSES))[y]
    # independent draws on every rank; the generator runs on from epoch to epoch
    sampler = WeightedRandomSampler(
        weights, num_samples=len(train) // world, replacement=True, generator=torch.Generator().manual_seed(6000 + rank)
    )
    loader = DataLoader(train, batch_size=40, sampler=sampler)

    net = nn.Sequential(
        nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 16, 9, padding=4), nn.ReLU(), nn.Conv1d(16, 16, 9, padding=4), nn.ReLU(),
        nn.AdaptiveMaxPool1d(8), nn.Flatten(), nn.Linear(128, CLASSES),
    )
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for epoch in range(EPOCHS):
        net.train()
        total = torch.zeros(2)
        for x, target in loader:
            loss = F.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(target), float(len(target))])
        dist.all_reduce(total)

        net.eval()
        confusion = torch.zeros(CLASSES, CLASSES)
        with torch.no_grad():
            x, target = val.tensors[0][rank::world], val.tensors[1][rank::world]
            pred = net(x).argmax(1)
        confusion += (target * CLASSES + pred).bincount(minlength=CLASSES**2).view(CLASSES, CLASSES)
        dist.all_reduce(confusion)
        recall = confusion.diag() / confusion.sum(1).clamp(min=1)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[1]:.4f} balanced accuracy {recall.mean():.3f}")

    if rank == 0:
        torch.save(net.state_dict(), "vibration.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
