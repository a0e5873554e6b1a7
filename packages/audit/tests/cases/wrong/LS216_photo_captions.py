"""Two-tower matching of photos and captions with negatives from every rank."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


def pairs(n, seed):
    world = torch.Generator().manual_seed(77)
    to_photo, to_text = torch.randn(12, 40, generator=world), torch.randn(12, 30, generator=world)
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 12, generator=g)
    photo = torch.tanh(z @ to_photo * 0.5) + 0.5 * torch.randn(n, 40, generator=g)
    text = torch.tanh(z @ to_text * 0.5) + 0.5 * torch.randn(n, 30, generator=g)
    return TensorDataset(photo, text)


class Towers(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.photo = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, d))
        self.text = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, d))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, photo, text):
        return F.normalize(self.photo(photo), dim=1), F.normalize(self.text(text), dim=1), self.log_scale.exp()


def everyone(z):
    parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z)
    return torch.cat(parts)


def matching_loss(p, t, scale):
    target = torch.arange(len(p)) + len(p) * dist.get_rank()
    to_text = scale * p @ everyone(t).T
    to_photo = scale * t @ everyone(p).T
    return (F.cross_entropy(to_text, target) + F.cross_entropy(to_photo, target)) / 2


def recall_at_1(model, val):
    with torch.no_grad():
        p, t, _ = model(*val.tensors)
    return ((p @ t.T).argmax(1) == torch.arange(len(p))).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    train, val = pairs(1024, 1), pairs(200, 2)
    sampler = DistributedSampler(train, seed=9)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)
    model = DDP(Towers())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for photo, text in loader:
            loss = matching_loss(*model(photo, text))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} recall@1 {recall_at_1(model.module, val):.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
