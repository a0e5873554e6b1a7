"""Hospitals have different numbers of patients; Join lets the smaller one finish early."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
PATIENTS = {0: 640, 1: 416}


def hospital(site, n, seed):
    g = torch.Generator().manual_seed(seed + 17 * site)
    x = torch.randn(n, 9, generator=g) + 0.2 * site
    y = (x[:, 0] + x[:, 1] * x[:, 2] + 0.5 * torch.randn(n, generator=g) > 0).float()[:, None]
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    train = hospital(rank, PATIENTS[rank], 1)
    val = hospital(rank, 100 + 30 * rank, 1000)
    loader = DataLoader(train, 32, shuffle=True, generator=torch.Generator().manual_seed(rank))
    model = DDP(nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        model.train()
        with Join([model]):
            for x, y in loader:
                opt.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
                opt.step()
        model.eval()
        with torch.no_grad():
            x, y = val.tensors
            right = ((model.module(x) > 0).float() == y).sum()
        tally = torch.tensor([right.item(), len(y)])
        dist.all_reduce(tally)
        if rank == 0:
            print(f"epoch {epoch}: {tally[0] / tally[1]:.4f} of {tally[1]} patients", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
