"""Two-tower contrastive training of image features against captions, negatives from the global batch."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTower(nn.Module):
    def __init__(self, d_img=48, vocab=120, dim=32):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(d_img, 64), nn.GELU(), nn.Linear(64, dim))
        self.words = nn.EmbeddingBag(vocab, 64, mode="mean")
        self.text = nn.Linear(64, dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, img, tokens):
        zi = F.normalize(self.image(img), dim=-1)
        zt = F.normalize(self.text(F.gelu(self.words(tokens))), dim=-1)
        return zi, zt, self.logit_scale.exp()


def gather_features(feats):
    return torch.cat(all_gather(feats))


def clip_loss(zi, zt, scale):
    all_i, all_t = gather_features(zi), gather_features(zt)
    target = torch.arange(len(zi)) + dist.get_rank() * len(zi)
    loss_i = F.cross_entropy(scale * zi @ all_t.t(), target)
    loss_t = F.cross_entropy(scale * zt @ all_i.t(), target)
    return (loss_i + loss_t) / 2


def make_pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(120, 48, generator=torch.Generator().manual_seed(99))
    tokens = torch.randint(0, 120, (n, 6), generator=g)
    img = mix[tokens].mean(1) + 0.2 * torch.randn(n, 48, generator=g)
    return TensorDataset(img, tokens)


@torch.no_grad()
def recall_at_1(net, pairs):
    net.eval()
    zi, zt, _ = net(*pairs.tensors)
    hit = ((zi @ zt.t()).argmax(1) == torch.arange(len(zi))).float().mean().item()
    net.train()
    return hit


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)

    train, test = make_pairs(2048, seed=1), make_pairs(256, seed=2)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=64, sampler=sampler, drop_last=True)

    model = DDP(TwoTower())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader))

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for img, tokens in loader:
            zi, zt, scale = model(img, tokens)
            loss = clip_loss(zi, zt, scale)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(max=4.6)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            r1 = recall_at_1(model.module, test)
            print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}  R@1 {r1:.3f}")
        dist.barrier()

    if rank == 0:
        torch.save(model.module.state_dict(), "two_tower.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
