"""Two hospitals with unequal numbers of patients train one risk model together."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

PATIENTS = [520, 800]
EPOCHS = 4


def hospital(rank, n, split):
    g = torch.Generator().manual_seed(10 * rank + split)
    w = torch.randn(16, generator=torch.Generator().manual_seed(99))
    x = torch.randn(n, 16, generator=g) + 0.2 * rank
    y = (x @ w + 0.8 * torch.randn(n, generator=g) > 0).float()
    return TensorDataset(x, y)


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    sums = torch.zeros(3)
    for x, y in loader:
        out = net(x).squeeze(1)
        sums[0] += F.binary_cross_entropy_with_logits(out, y, reduction="sum")
        sums[1] += ((out > 0) == (y > 0.5)).sum()
        sums[2] += len(y)
    dist.all_reduce(sums)
    net.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)

    n = PATIENTS[rank]
    shuffle = torch.Generator().manual_seed(50 + rank)
    train_loader = DataLoader(hospital(rank, n, 0), batch_size=32, shuffle=True, generator=shuffle)
    test_loader = DataLoader(hospital(rank, n // 4, 1), batch_size=64)

    net = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 1))
    model = DDP(net)
    # plain SGD keeps no state that a rank which is done early would miss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    for epoch in range(EPOCHS):
        with model.join(divide_by_initial_world_size=False):
            for x, y in train_loader:
                loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        scheduler.step()
        test_loss, acc = evaluate(net, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: test loss {test_loss:.4f} acc {acc:.3f} over both hospitals")

    if rank == 0:
        torch.save(net.state_dict(), "risk.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
