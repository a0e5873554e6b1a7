import argparse
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CheckpointManager:
    def __init__(self, folder):
        self.path = Path(folder) / "state.pt"
        if dist.get_rank() == 0:
            self.path.parent.mkdir(exist_ok=True)

    def save(self, step, model, opt):
        if dist.get_rank() == 0:
            torch.save({"step": step, "model": model.state_dict(), "opt": opt.state_dict()}, self.path)
        dist.barrier()

    def restore(self, model, opt):
        """Give back the step to continue with."""
        if not self.path.exists():
            return 0
        state = torch.load(self.path, map_location="cpu")
        model.load_state_dict(state["model"])
        if dist.get_rank() == 0:
            opt.load_state_dict(state["opt"])
            print("restored", self.path, "at step", state["step"])
        return state["step"]


def batches(loader, sampler, start):
    """Endless batches; `start` batches are skipped so that a resumed run sees the next ones."""
    per_epoch = len(loader)
    for epoch in itertools.count(start // per_epoch):
        sampler.set_epoch(epoch)
        skip = start - epoch * per_epoch if epoch == start // per_epoch else 0
        for i, batch in enumerate(loader):
            if i >= skip:
                yield batch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--folder", default="ckpt")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(23)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(640, 10, generator=g)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], 1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    net = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    manager = CheckpointManager(args.folder)
    start = manager.restore(net, opt) if args.resume else 0

    stream = batches(loader, sampler, start)
    for step in range(start, args.steps):
        xb, yb = next(stream)
        loss = nn.functional.smooth_l1_loss(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss on rank 0 {loss.item():.4f}")
    manager.save(args.steps, net, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
