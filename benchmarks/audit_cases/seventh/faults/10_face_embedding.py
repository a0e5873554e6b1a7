"""Face-like embedding training with an additive angular margin loss."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class MarginLoss(nn.Module):
    def __init__(self, dim, n_ids, margin=0.2, scale=16.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_ids, dim))
        nn.init.xavier_uniform_(self.weight)
        self.margin, self.scale = margin, scale

    def forward(self, emb, target):
        cosine = F.linear(F.normalize(emb), F.normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
        theta = torch.acos(cosine)
        onehot = F.one_hot(target, self.weight.size(0)).bool()
        logits = torch.where(onehot, torch.cos((theta + self.margin).clamp(max=math.pi)), cosine)
        return F.cross_entropy(self.scale * logits, target)


class Embedder(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU())
        self.fc = nn.Linear(32 * 9, dim)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


def identities(n_ids=20, per_id=40):
    g = torch.Generator().manual_seed(21)
    faces = torch.randn(n_ids, 1, 12, 12, generator=g)
    labels = torch.arange(n_ids).repeat_interleave(per_id)
    images = faces[labels] + 0.9 * torch.randn(len(labels), 1, 12, 12, generator=g)
    held = torch.arange(len(labels)) % 5 == 0
    return (images[~held], labels[~held]), (images[held], labels[held])


@torch.no_grad()
def verification(model, images, labels):
    emb = F.normalize(model(images))
    sim = emb @ emb.T - 2 * torch.eye(len(emb))
    return (labels[sim.argmax(1)] == labels).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    (x_train, y_train), (x_val, y_val) = identities()
    train = TensorDataset(x_train, y_train)
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler)

    model = DDP(Embedder())
    criterion = MarginLoss(24, 20)
    optimizer = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": criterion.parameters(), "weight_decay": 5e-4}],
        lr=0.05, momentum=0.9)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            acc = verification(model.module, x_val, y_val)
            print(f"epoch {epoch} loss {total.item() / (world * len(loader)):.3f} nn-acc {acc:.3f}")

    if rank == 0:
        torch.save({"backbone": model.module.state_dict(), "margin": criterion.state_dict()}, "face.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
