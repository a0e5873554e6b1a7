import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class HyperNet(nn.Module):
    def __init__(self, tasks, hidden=8):
        super().__init__()
        self.hidden = hidden
        self.codes = nn.Embedding(tasks, 6)
        self.make = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3 * hidden + 1))

    def forward(self, task, x):
        w = self.make(self.codes(task))
        h = self.hidden
        w1, b1, w2, b2 = w[:, :h], w[:, h : 2 * h], w[:, 2 * h : 3 * h], w[:, 3 * h :]
        hidden = torch.tanh(x[:, :, None] * w1[:, None] + b1[:, None])
        return (hidden * w2[:, None]).sum(-1) + b2


class Sines(Dataset):
    def __init__(self, tasks=32):
        self.tasks = tasks
        self.x = torch.linspace(-3, 3, 20)

    def __len__(self):
        return self.tasks

    def __getitem__(self, i):
        return i, self.x, torch.sin(self.x + i / self.tasks * 3)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ds = Sines()
    model = DDP(HyperNet(len(ds)))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    sampler = DistributedSampler(ds, seed=3)
    loader = DataLoader(ds, 4, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for task, x, y in loader:
            loss = (model(task, x) - y).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
