"""CLIP style dual encoder on synthetic image/caption pairs."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_pairs(n=1024, latent=12):
    g = torch.Generator().manual_seed(11)
    z = torch.randn(n, latent, generator=g)
    to_image = torch.randn(latent, 3 * 8 * 8, generator=g) / math.sqrt(latent)
    to_text = torch.randn(latent, 40, generator=g)
    images = (z @ to_image + 0.3 * torch.randn(n, 192, generator=g)).view(n, 3, 8, 8)
    tokens = (z @ to_text).topk(6, dim=1).indices
    return images, tokens


class DualEncoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GELU(), nn.Flatten(), nn.Linear(32 * 16, dim))
        self.text_emb = nn.EmbeddingBag(40, 64)
        self.text = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, tokens):
        img = F.normalize(self.image(images), dim=-1)
        txt = F.normalize(self.text(self.text_emb(tokens)), dim=-1)
        return img, txt, self.logit_scale.exp()


def gather(features):
    buckets = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(buckets, features)
    return torch.cat(buckets)


def clip_loss(img, txt, scale):
    all_img, all_txt = gather(img), gather(txt)
    logits_img = scale * img @ all_txt.T
    logits_txt = scale * txt @ all_img.T
    labels = torch.arange(len(img)) + dist.get_rank() * len(img)
    return 0.5 * (F.cross_entropy(logits_img, labels) + F.cross_entropy(logits_txt, labels))


@torch.no_grad()
def retrieval_at_1(model, images, tokens):
    img, txt, _ = model(images, tokens)
    return ((img @ txt.T).argmax(1) == torch.arange(len(img))).float().mean().item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    images, tokens = make_pairs()
    train = TensorDataset(images[:896], tokens[:896])
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)

    model = DDP(DualEncoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        running = torch.zeros(1)
        for im, tk in loader:
            loss = clip_loss(*model(im, tk))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
        dist.all_reduce(running)
        model.eval()
        r1 = retrieval_at_1(model, images[896:], tokens[896:])
        if rank == 0:
            mean = running.item() / (len(loader) * dist.get_world_size())
            print(f"epoch {epoch} loss {mean:.3f} held-out R@1 {r1:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
