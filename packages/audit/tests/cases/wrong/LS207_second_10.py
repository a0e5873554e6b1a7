import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class DepthAndLabel(Dataset):
    def __init__(self, n=512):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 20, generator=g)
        self.depth = (self.x[:, :5] ** 2).sum(1, keepdim=True) + 0.5 * torch.randn(n, 1, generator=g)
        self.label = (self.x[:, 5:8] + 0.3 * torch.randn(n, 3, generator=g)).argmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.depth[i], self.label[i]


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.depth = nn.Linear(64, 1)
        self.label = nn.Linear(64, 3)

    def forward(self, x):
        h = self.backbone(x)
        return self.depth(h), self.label(h)


class UncertaintyLoss(nn.Module):
    """Weights of the tasks are learned (Kendall et al. 2018)."""

    def __init__(self):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, depth_pred, depth, label_pred, label):
        l1 = F.mse_loss(depth_pred, depth)
        l2 = F.cross_entropy(label_pred, label)
        s = self.log_var
        return 0.5 * torch.exp(-s[0]) * l1 + torch.exp(-s[1]) * l2 + 0.5 * s.sum()


class Trainer:
    def __init__(self, epochs=4, lr=3e-3):
        self.rank = dist.get_rank()
        self.epochs = epochs
        data = DepthAndLabel()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=16, sampler=self.sampler)
        self.model = DDP(TwoHeads())
        self.criterion = UncertaintyLoss()
        params = list(self.model.parameters()) + list(self.criterion.parameters())
        self.opt = torch.optim.Adam(params, lr=lr)

    def fit(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            total = torch.zeros(())
            for x, depth, label in self.loader:
                d, c = self.model(x)
                loss = self.criterion(d, depth, c, label)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                total += loss.detach()
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {epoch}: {total.item() / len(self.loader) / dist.get_world_size():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer().fit()
    dist.destroy_process_group()
