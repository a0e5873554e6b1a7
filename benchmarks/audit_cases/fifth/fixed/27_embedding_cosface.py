import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

IDENTITIES = 20
DIM = 16


def faces(n, seed):
    centers = torch.randn(IDENTITIES, 40, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    who = torch.randint(0, IDENTITIES, (n,), generator=g)
    x = centers[who] + 1.1 * torch.randn(n, 40, generator=g)
    return TensorDataset(x, who)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, DIM))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


class CosFace(nn.Module):
    def __init__(self, classes, dim, margin=0.2, scale=16.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, dim))
        self.margin, self.scale = margin, scale

    def forward(self, emb, labels):
        cos = emb @ F.normalize(self.weight, dim=1).t()
        target = F.one_hot(labels, cos.size(1)) * self.margin
        return F.cross_entropy(self.scale * (cos - target), labels)


@torch.no_grad()
def embed(accelerator, encoder, loader):
    encoder.eval()
    embs, ids = [], []
    for x, y in loader:
        e, y = accelerator.gather_for_metrics((encoder(x), y))
        embs.append(e)
        ids.append(y)
    encoder.train()
    return torch.cat(embs), torch.cat(ids)


def recall_at_1(q, q_ids, gal, gal_ids):
    nearest = (q @ gal.t()).argmax(dim=1)
    return (gal_ids[nearest] == q_ids).float().mean().item()


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(21)

    train_loader = DataLoader(faces(2048, 0), batch_size=32, shuffle=True, drop_last=True)
    gallery_loader = DataLoader(faces(201, 1), batch_size=64)
    query_loader = DataLoader(faces(301, 2), batch_size=64)

    encoder = Encoder()
    criterion = CosFace(IDENTITIES, DIM)
    optimizer = torch.optim.SGD(
        [
            {"params": encoder.parameters(), "lr": 0.05},
            {"params": criterion.parameters(), "lr": 0.1},
        ],
        momentum=0.9,
    )
    encoder, criterion, optimizer = accelerator.prepare(encoder, criterion, optimizer)
    train_loader, gallery_loader, query_loader = accelerator.prepare(
        train_loader, gallery_loader, query_loader
    )

    for epoch in range(3):
        losses = []
        for x, y in train_loader:
            loss = criterion(encoder(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
        gal, gal_ids = embed(accelerator, encoder, gallery_loader)
        q, q_ids = embed(accelerator, encoder, query_loader)
        accelerator.print(f"epoch {epoch} loss {mean:.4f} R@1 {recall_at_1(q, q_ids, gal, gal_ids):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
