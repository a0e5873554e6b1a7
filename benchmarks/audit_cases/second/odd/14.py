import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ResumableSampler(DistributedSampler):
    """Leaves out the first `skip` samples of this rank; used once, after a restart."""

    skip = 0

    def __iter__(self):
        indices = list(super().__iter__())[self.skip :]
        self.skip = 0
        return iter(indices)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--total-steps", type=int, default=70)
    ap.add_argument("--steps-per-job", type=int, default=35)
    ap.add_argument("--bs", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    x = torch.randn(640, 12)
    y = (x @ torch.randn(12, 4)).argmax(1)
    data = TensorDataset(x, y)
    sampler = ResumableSampler(data, seed=5)
    loader = DataLoader(data, batch_size=args.bs, sampler=sampler)  # 20 batches per epoch and rank
    per_epoch = len(loader)

    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.total_steps)
    step = 0
    if os.path.exists("state.pt"):
        state = torch.load("state.pt", map_location="cpu")
        model.module.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        step = state["step"]
        if rank == 0:
            print("resumed at step", step)

    end = min(args.total_steps, step + args.steps_per_job)
    while step < end:
        sampler.set_epoch(step // per_epoch)
        sampler.skip = step % per_epoch * args.bs
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            step += 1
            if step >= end:
                break
    mean = loss.detach()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item() / dist.get_world_size():.4f}")
        state = {"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "step": step}
        torch.save(state, "state.pt.tmp")
        os.replace("state.pt.tmp", "state.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
