import csv
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def is_main():
    return dist.get_rank() == 0


def main():
    dist.init_process_group("gloo")
    if is_main():
        os.makedirs("run", exist_ok=True)
        log = open("run/log.csv", "w", newline="")
        writer = csv.writer(log)
        writer.writerow(["epoch", "loss"])
    dist.barrier()

    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(512, 8, generator=g)
    data = TensorDataset(x, x.cumsum(1)[:, -1:])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(xb), len(xb)])
        dist.reduce(total, dst=0)
        if is_main():
            mean = (total[0] / total[1]).item()
            writer.writerow([epoch, mean])
            print(f"epoch {epoch} loss {mean:.4f}")
            torch.save(model.module.state_dict(), f"run/epoch{epoch}.pt")
        dist.barrier()
    if is_main():
        log.close()
    # everybody reads what rank 0 wrote
    state = torch.load("run/epoch2.pt")
    assert all(torch.equal(state[k], v) for k, v in model.module.state_dict().items())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
