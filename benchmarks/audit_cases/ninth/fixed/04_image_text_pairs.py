"""Dual encoder on paired (image, caption) features with a global-batch InfoNCE loss."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    def __init__(self, n=640, topics=40):
        g = torch.Generator().manual_seed(5)
        self.topic = torch.randint(0, topics, (n,), generator=g)
        latent = torch.randn(n, 8, generator=g)
        self.image = torch.tanh(latent @ torch.randn(8, 48, generator=g)) + 0.1 * torch.randn(n, 48, generator=g)
        words = (latent @ torch.randn(8, 60, generator=g)).topk(6, dim=1).indices
        self.caption = words

    def __len__(self):
        return len(self.topic)

    def __getitem__(self, i):
        return self.image[i], self.caption[i]


class DualEncoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, dim))
        self.embed = nn.EmbeddingBag(60, 64, mode="mean")
        self.textual = nn.Sequential(nn.GELU(), nn.Linear(64, dim))
        self.logit_scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, image, caption):
        img = F.normalize(self.visual(image), dim=-1)
        txt = F.normalize(self.textual(self.embed(caption)), dim=-1)
        return img, txt, self.logit_scale.exp()


class GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        ctx.n = x.size(0)
        return torch.cat(out, dim=0)

    @staticmethod
    def backward(ctx, grad):
        # every rank's loss sees the features of every rank: add up their gradients, keep the own part
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.n
        return grad[start : start + ctx.n]


def gather_features(x):
    return GatherWithGrad.apply(x)


def clip_loss(img, txt, scale):
    all_img = gather_features(img)
    all_txt = gather_features(txt)
    targets = torch.arange(len(img)) + dist.get_rank() * len(img)
    loss_i = F.cross_entropy(scale * img @ all_txt.t(), targets)
    loss_t = F.cross_entropy(scale * txt @ all_img.t(), targets)
    return (loss_i + loss_t) / 2


@torch.no_grad()
def recall_at_1(model, data):
    model.eval()
    img, txt, _ = model.module(data.image[:200], data.caption[:200])
    model.train()
    return (img @ txt.t()).argmax(1).eq(torch.arange(200)).float().mean().item()


def run():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    data = Pairs()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(DualEncoder())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        running = torch.zeros(1)
        for image, caption in loader:
            loss = clip_loss(*model(image, caption))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(max=4.6)
            running += loss.item()
        dist.all_reduce(running)
        if dist.get_rank() == 0:
            mean_loss = running.item() / (len(loader) * dist.get_world_size())
            print(f"epoch {epoch} loss {mean_loss:.3f} R@1 {recall_at_1(model, data):.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
