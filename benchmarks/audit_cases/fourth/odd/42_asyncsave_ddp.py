"""Checkpoints are copied in the training loop and written by a background thread of rank 0."""
import copy
import os
import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


class Writer(threading.Thread):
    def __init__(self):
        super().__init__()
        self.jobs = queue.Queue()

    def put(self, path, state):
        self.jobs.put((path, copy.deepcopy(state)))

    def run(self):
        while (job := self.jobs.get()) is not None:
            path, state = job
            torch.save(state, path + ".part")
            os.replace(path + ".part", path)

    def close(self):
        self.jobs.put(None)
        self.join()


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 10, 10, generator=g)
    return TensorDataset(x, x.mean((1, 2, 3)) * 10)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 1), nn.Flatten(0)))
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    train = data(192, 0)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    writer = Writer() if rank == 0 else None
    if writer:
        writer.start()
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if writer and step % 6 == 0:
                writer.put(f"step{step}.pt", {"model": net.module.state_dict(), "opt": opt.state_dict(), "step": step})
    if writer:
        writer.close()
    dist.barrier()
    last = torch.load(f"step{step - step % 6}.pt")
    buffers = dict(net.module.named_buffers())
    same = all(torch.equal(v, last["model"][k]) for k, v in net.module.state_dict().items() if k not in buffers)
    print(f"rank {rank} step {step} loss {loss.item():.4f} last checkpoint {last['step']} parameters as in memory: {same}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
