"""Checkpoints are written by a thread on rank 0 from a copy of the weights; a rename makes each one complete."""
import copy
import os
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


class Writer:
    def __init__(self, folder):
        self.folder, self.thread = folder, None
        os.makedirs(folder, exist_ok=True)

    def _write(self, state, step):
        tmp = os.path.join(self.folder, f".step{step}.tmp")
        torch.save(state, tmp)
        os.replace(tmp, os.path.join(self.folder, "latest.pt"))

    def save(self, net, opt, step):
        self.wait()
        state = {"net": {k: v.detach().clone() for k, v in net.state_dict().items()},
                 "opt": copy.deepcopy(opt.state_dict()), "step": step}
        self.thread = threading.Thread(target=self._write, args=(state, step))
        self.thread.start()

    def wait(self):
        if self.thread is not None:
            self.thread.join()


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 18, generator=g)
    return TensorDataset(x, (x[:, :6].sum(1) > x[:, 6:12].abs().sum(1) - 4).long())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    train, val = data(960, 1), data(240, 2)
    sampler = DistributedSampler(train, seed=2)
    loader = DataLoader(train, 24, sampler=sampler)
    net = nn.Sequential(nn.Linear(18, 48), nn.ReLU(), nn.Linear(48, 2))
    model = DDP(net)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    writer = Writer("ckpt") if rank == 0 else None
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            step += 1
            if step % 7 == 0 and writer:
                writer.save(net, opt, step)
    if writer:
        writer.save(net, opt, step)
        writer.wait()
    dist.barrier()
    state = torch.load("ckpt/latest.pt")
    fresh = copy.deepcopy(net)
    fresh.load_state_dict(state["net"])
    x, y = val[rank::world]
    with torch.no_grad():
        hit = (fresh(x).argmax(1) == y).sum()
    dist.all_reduce(hit)
    if rank == 0:
        print(f"checkpoint of step {state['step']}: accuracy {hit.item() / len(val):.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
