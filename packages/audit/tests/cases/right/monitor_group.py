"""A background thread averages the step losses over its own process group while training goes on."""
import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


class Monitor(threading.Thread):
    def __init__(self, group):
        super().__init__(daemon=True)
        self.group, self.q, self.history = group, queue.Queue(), []

    def run(self):
        while (item := self.q.get()) is not None:
            step, loss = item
            t = torch.tensor([loss, 1.0])
            dist.all_reduce(t, group=self.group)
            self.history.append((step, (t[0] / t[1]).item()))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    watch_group = dist.new_group(backend="gloo")
    solo = [dist.new_group([r]) for r in range(world)][rank]
    monitor = Monitor(watch_group)
    monitor.start()
    g = torch.Generator().manual_seed(4)
    x = torch.randn(800, 8, generator=g)
    data = TensorDataset(x, (x[:, :2].prod(1) > 0).long())
    sampler = DistributedSampler(data, seed=6)
    loader = DataLoader(data, 25, sampler=sampler)
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    step = 0
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = nn.functional.cross_entropy(model(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
            monitor.q.put((step, loss.item()))
            step += 1
        checks = torch.ones(1)
        dist.all_reduce(checks, group=solo)      # a group of one: must stay 1
        assert checks.item() == 1
    monitor.q.put(None)
    monitor.join()
    if rank == 0:
        for s, l in monitor.history[::16]:
            print(f"step {s} loss {l:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
