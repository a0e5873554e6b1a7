import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save(path, model, optimizer, epoch):
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def load(path, model, optimizer):
    if not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--stop-after", type=int, default=3, help="epochs in one job (time limit of the queue)")
    ap.add_argument("--ckpt", default="last.pt")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(31)
    x = torch.randn(640, 14)
    y = (x @ torch.randn(14, 6)).argmax(1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True, seed=31)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(14, 40), nn.ReLU(), nn.Linear(40, 6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    start = load(args.ckpt, model, optimizer)
    todo = min(args.stop_after, args.epochs - start)
    for i in range(todo):
        sampler.set_epoch(i)
        total = torch.zeros(1)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {start + i} loss {total.item() / len(loader) / dist.get_world_size():.4f}")
        save(args.ckpt, model, optimizer, start + i)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
