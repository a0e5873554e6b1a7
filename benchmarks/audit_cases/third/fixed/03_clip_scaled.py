"""Mixed precision training loop with gradient clipping."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, loader, sampler, args):
        self.model = DDP(model)
        self.loader = loader
        self.sampler = sampler
        self.args = args
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=args.init_scale)

    def train_step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(x).float(), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach(), norm

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            losses = []
            for x, y in self.loader:
                loss, norm = self.train_step(x, y)
                losses.append(loss)
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {mean.item() / dist.get_world_size():.4f} scale {self.scaler.get_scale():.0f}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=0.3)
    p.add_argument("--max-norm", type=float, default=1.0)
    p.add_argument("--init-scale", type=float, default=1024.0)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(11)
    x = torch.randn(128, 12, generator=g)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    net = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 2))
    Trainer(net, loader, sampler, args).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
