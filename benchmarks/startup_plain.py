"""For `startup.py`: a hand-written loop with DDP, tqdm and TensorBoard. Marks the time of the first step."""

import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(1000, 10), torch.randn(1000, 5))
    loader = DataLoader(data, 32 // world, sampler=DistributedSampler(data, world, rank))
    writer = SummaryWriter(tempfile.mkdtemp()) if rank == 0 else None
    bar = tqdm(total=2, disable=rank > 0)
    for step, (inputs, targets) in enumerate(loader):
        if step == 1 and rank == 0:
            with open(os.environ["MARK"], "w") as file:
                file.write(str(time.time()))
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.update()
        if step == 1:
            break
    if writer is not None:
        writer.add_scalar("loss", float(loss), 1)
        writer.close()
    if world > 1:
        dist.destroy_process_group()


main()
