import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def split(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, ((x[:, :3] ** 2).sum(1) > 2.4).long())


class Trainer:
    def __init__(self):
        self.rank = dist.get_rank()
        # evaluation on rank 0 may take long, so the wait has its own group
        self.wait = dist.new_group(backend="gloo")
        train = split(640, 0)
        self.sampler = DistributedSampler(train)
        self.loader = DataLoader(train, 16, sampler=self.sampler)
        self.val = DataLoader(split(333, 1), 64)
        net = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
        self.model = DDP(net)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.best = 0.0

    @torch.no_grad()
    def evaluate(self):
        net = self.model.module
        net.eval()
        hits = sum((net(x).argmax(1) == y).sum().item() for x, y in self.val)
        net.train()
        return hits / len(self.val.dataset)

    def fit(self, epochs, patience=2):
        bad = 0
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.opt.zero_grad()
                F.cross_entropy(self.model(x), y).backward()
                self.opt.step()
            stop = [False]
            if self.rank == 0:
                acc = self.evaluate()
                print(f"epoch {epoch} acc {acc:.3f}")
                if acc > self.best:
                    self.best, bad = acc, 0
                    torch.save(self.model.module.state_dict(), "best.pt")
                else:
                    bad += 1
                stop = [bad >= patience]
            dist.barrier(group=self.wait)
            dist.broadcast_object_list(stop, src=0, group=self.wait)
            if stop[0]:
                break


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer().fit(6)
    dist.destroy_process_group()
