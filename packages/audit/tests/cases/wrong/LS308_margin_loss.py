"""Speaker embeddings with an additive angular margin. The loss has a weight for each speaker."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SPEAKERS, MARGIN, SCALE = 6, 0.2, 16.0


class MarginLoss(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SPEAKERS, width))

    def forward(self, embeddings, speakers):
        cosines = F.normalize(embeddings) @ F.normalize(self.weight).T
        own = F.one_hot(speakers, SPEAKERS).bool()
        angles = torch.acos(cosines.clamp(-0.999, 0.999))
        return F.cross_entropy(SCALE * torch.where(own, torch.cos(angles + MARGIN), cosines), speakers)


class Trainer:
    def __init__(self):
        torch.manual_seed(11)
        self.net = DDP(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8)))
        self.criterion = MarginLoss(8)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def fit(self, data):
        sampler = DistributedSampler(data, seed=11)
        loader = DataLoader(data, batch_size=8, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for features, speakers in loader:
                loss = self.criterion(self.net(features), speakers)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(3)
    speakers = torch.randint(SPEAKERS, (96,), generator=generator)
    centers = torch.randn(SPEAKERS, 20, generator=generator)
    features = centers[speakers] + 0.3 * torch.randn(96, 20, generator=generator)
    Trainer().fit(TensorDataset(features, speakers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
