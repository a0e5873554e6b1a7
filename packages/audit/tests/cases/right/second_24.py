import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.epoch = 0

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "epoch": self.epoch}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.epoch = state["epoch"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--dir", default="dcp")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(320, 8)
    data = TensorDataset(x, x.pow(2).mean(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)

    def build():
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        for m in model:
            if isinstance(m, nn.Linear):
                fully_shard(m)
        fully_shard(model)
        return model, torch.optim.Adam(model.parameters(), lr=3e-3)

    app = AppState(*build())
    for epoch in range(args.epochs):
        if epoch == args.epochs // 2:
            # all ranks write their shards, then training goes on from the files
            app.epoch = epoch
            path = os.path.join(args.dir, f"epoch{epoch}")
            dcp.save({"app": app}, checkpoint_id=path)
            app = AppState(*build())
            dcp.load({"app": app}, checkpoint_id=path)
            assert app.epoch == epoch
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for xb, yb in loader:
            loss = nn.functional.mse_loss(app.model(xb), yb)
            app.optimizer.zero_grad()
            loss.backward()
            app.optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mse {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
