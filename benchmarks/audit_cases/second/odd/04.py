import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def hospital(rank):
    """Each site keeps its own patients, and the sites are not equally large."""
    n = 320 if rank == 0 else 224
    g = torch.Generator().manual_seed(50 + rank)
    x = torch.randn(n, 8, generator=g)
    risk = x[:, 0] + 0.5 * x[:, 1] ** 2 + 0.2 * torch.randn(n, generator=g)
    return TensorDataset(x, (risk > 0.6).float().unsqueeze(1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    loader = DataLoader(hospital(rank), batch_size=16, shuffle=True)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(3):
        total = torch.zeros(2)
        with Join([model]):
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                total += torch.tensor([loss.item() * len(x), len(x)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
