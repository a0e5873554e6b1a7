import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--stop-after", type=int, default=0, help="save and leave after that many batches")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(9)
    x = torch.randn(256, 10, generator=g)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(loader))
    epoch0 = batch0 = 0
    if args.resume:
        state = torch.load("mid.pt")
        net.load_state_dict(state["net"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        epoch0, batch0 = state["epoch"], state["batch"]
    done = 0
    for epoch in range(epoch0, args.epochs):
        sampler.set_epoch(epoch)
        for i, (xb, yb) in enumerate(loader):
            if epoch == epoch0 and i < batch0:
                continue
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(xb), yb)
            loss.backward()
            opt.step()
            sched.step()
            done += 1
            if done == args.stop_after:
                if dist.get_rank() == 0:
                    state = {"net": net.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}
                    torch.save({**state, "epoch": epoch, "batch": i + 1}, "mid.pt")
                dist.barrier()
                dist.destroy_process_group()
                return
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss(rank 0) {loss.item():.4f} lr {sched.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
