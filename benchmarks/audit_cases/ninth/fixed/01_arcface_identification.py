"""Speaker identification with an additive angular margin head."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

N_SPEAKERS = 24
FRAMES, MELS = 20, 16
EPOCHS = 3


def make_corpus(seed=11, per_speaker=40):
    g = torch.Generator().manual_seed(seed)
    voices = torch.randn(N_SPEAKERS, 1, MELS, generator=g)
    labels = torch.arange(N_SPEAKERS).repeat_interleave(per_speaker)
    feats = voices[labels] + 0.8 * torch.randn(len(labels), FRAMES, MELS, generator=g)
    return TensorDataset(feats, labels)


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, 48, 3, padding=1)
        self.conv2 = nn.Conv1d(48, 48, 3, padding=1)
        self.proj = nn.Linear(96, dim)

    def forward(self, x):
        h = F.relu(self.conv1(x.transpose(1, 2)))
        h = F.relu(self.conv2(h))
        stats = torch.cat([h.mean(-1), h.std(-1)], dim=1)
        return self.proj(stats)


class ArcMarginLoss(nn.Module):
    def __init__(self, dim, n_classes, margin=0.2, scale=16.0):
        super().__init__()
        self.centers = nn.Parameter(torch.empty(n_classes, dim))
        nn.init.xavier_normal_(self.centers)
        self.scale = scale
        self.cos_m, self.sin_m = math.cos(margin), math.sin(margin)

    def forward(self, emb, labels):
        cos = F.linear(F.normalize(emb), F.normalize(self.centers)).clamp(-1 + 1e-6, 1 - 1e-6)
        sin = (1 - cos**2).sqrt()
        with_margin = cos * self.cos_m - sin * self.sin_m
        one_hot = F.one_hot(labels, cos.size(1)).bool()
        logits = torch.where(one_hot, with_margin, cos) * self.scale
        acc = (cos.argmax(1) == labels).float().mean()
        return F.cross_entropy(logits, labels), acc


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1234)

    data = make_corpus()
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

    encoder = DDP(Encoder())
    criterion = DDP(ArcMarginLoss(32, N_SPEAKERS))
    optimizer = torch.optim.SGD(
        [
            {"params": encoder.parameters()},
            {"params": criterion.parameters(), "lr": 0.1},
        ],
        lr=0.05,
        momentum=0.9,
        weight_decay=1e-4,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        totals = torch.zeros(3)
        for feats, labels in loader:
            loss, acc = criterion(encoder(feats), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            totals += torch.tensor([loss.item(), acc.item(), 1.0])
        dist.all_reduce(totals)
        if rank == 0:
            print(f"epoch {epoch} loss {totals[0] / totals[2]:.3f} acc {totals[1] / totals[2]:.3f}")

    if rank == 0:
        torch.save({"encoder": encoder.module.state_dict(), "head": criterion.module.state_dict()}, "speaker_id.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
