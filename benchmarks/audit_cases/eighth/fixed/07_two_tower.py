"""Two-tower contrastive training (CLIP style) on paired synthetic views."""
import math

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4
BATCH = 32


def make_pairs(n=1024, seed=9):
    g = torch.Generator().manual_seed(seed)
    latent = torch.randn(n, 12, generator=g)
    to_image = torch.randn(12, 64, generator=g)
    to_text = torch.randn(12, 40, generator=g)
    image = torch.tanh(latent @ to_image) + 0.3 * torch.randn(n, 64, generator=g)
    text = torch.relu(latent @ to_text) + 0.3 * torch.randn(n, 40, generator=g)
    return TensorDataset(image, text)


class TwoTower(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, dim))
        self.text = nn.Sequential(nn.Linear(40, 96), nn.GELU(), nn.Linear(96, dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.1)))

    def forward(self, image, text):
        img = F.normalize(self.image(image), dim=-1)
        txt = F.normalize(self.text(text), dim=-1)
        return img, txt, self.logit_scale.exp()


def gather_features(x):
    return torch.cat(torch.distributed.nn.functional.all_gather(x))


def clip_loss(img, txt, scale):
    all_img = gather_features(img)
    all_txt = gather_features(txt)
    logits_per_image = scale * img @ all_txt.t()
    logits_per_text = scale * txt @ all_img.t()
    target = torch.arange(len(img)) + dist.get_rank() * len(img)
    return (F.cross_entropy(logits_per_image, target) + F.cross_entropy(logits_per_text, target)) / 2


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(17)

    pairs = make_pairs()
    sampler = DistributedSampler(pairs, shuffle=True, drop_last=True)
    loader = DataLoader(pairs, batch_size=BATCH, sampler=sampler, drop_last=True)
    model = DDP(TwoTower())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for image, text in loader:
            img, txt, scale = model(image, text)
            loss = clip_loss(img, txt, scale)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, math.log(100))
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: contrastive loss {total[0] / total[1]:.4f}")

    if rank == 0:
        torch.save(model.module.state_dict(), "two_tower.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
