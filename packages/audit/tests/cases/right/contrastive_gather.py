import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTower(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, d))
        self.text = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, d))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.logit_scale.exp()


def clip_loss(image, text, scale):
    all_image = torch.cat(dist_fn.all_gather(image))
    all_text = torch.cat(dist_fn.all_gather(text))
    labels = torch.arange(len(image)) + dist.get_rank() * len(image)
    return 0.5 * (F.cross_entropy(scale * image @ all_text.T, labels) + F.cross_entropy(scale * text @ all_image.T, labels))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(TwoTower())
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    g = torch.Generator().manual_seed(7)
    text = torch.randn(128, 6, generator=g)
    ds = TensorDataset(text @ torch.randn(6, 12, generator=g), text)
    sampler = DistributedSampler(ds, drop_last=True)
    loader = DataLoader(ds, 16, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for image, txt in loader:
            loss = clip_loss(*model(image, txt))
            opt.zero_grad()
            loss.backward()
            opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {mean.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
