"""House prices, one csv-like table, plateau schedule."""
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

torch.set_num_threads(1)


class Trainer:
    def __init__(self, epochs=10):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.epochs = epochs
        x, y = self.table(512, 1)
        vx, vy = self.table(128, 2)
        self.train = TensorDataset(x, y)
        self.sampler = DistributedSampler(self.train, seed=1)
        self.loader = DataLoader(self.train, batch_size=32, sampler=self.sampler, drop_last=True)
        share = slice(self.rank, None, self.world)
        self.vx, self.vy = vx[share], vy[share]
        torch.manual_seed(2)
        self.net = DDP(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 1)))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.08, momentum=0.9)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.3, patience=0, threshold=0.02)

    @staticmethod
    def table(n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 12, generator=g)
        y = 3 * x[:, :1] + x[:, 1:2] * x[:, 2:3] + 0.7 * torch.randn(n, 1, generator=g)
        return x, y

    def fit_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.net.train()
        for x, y in self.loader:
            self.opt.zero_grad()
            loss = nn.functional.mse_loss(self.net(x), y)
            loss.backward()
            self.opt.step()

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        loss = nn.functional.mse_loss(self.net.module(self.vx), self.vy)
        dist.all_reduce(loss)
        return loss.item() / self.world

    def run(self):
        for epoch in range(self.epochs):
            self.fit_epoch(epoch)
            val = self.validate()
            self.plateau.step(val)
            if self.rank == 0:
                print(f"epoch {epoch} val {val:.4f}", flush=True)
        lr = self.opt.param_groups[0]["lr"]
        w = sum(p.double().abs().sum().item() for p in self.net.parameters())
        print(f"[{self.rank}] lr {lr:.6f} weights {w:.6f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer().run()
    dist.destroy_process_group()
