import torch
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(50)
    to_img, to_txt = torch.randn(8, 32, generator=fixed), torch.randn(8, 20, generator=fixed)
    z = torch.randn(n, 8, generator=g)
    image = torch.tanh(z @ to_img) + 0.1 * torch.randn(n, 32, generator=g)
    text = torch.tanh(z @ to_txt) + 0.1 * torch.randn(n, 20, generator=g)
    return TensorDataset(image, text)


class TwoTower(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, dim))
        self.text = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, dim))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.log_scale.exp()


def clip_loss(img, txt, scale):
    # all processes compute the same loss over the joined batch; the backward of all_gather
    # sums the gradients of all copies, which the mean over processes undoes
    img = torch.cat(dist_fn.all_gather(img))
    txt = torch.cat(dist_fn.all_gather(txt))
    logits = scale * img @ txt.t()
    target = torch.arange(len(img))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


@torch.no_grad()
def retrieval(accelerator, model, loader):
    model.eval()
    images, texts = [], []
    for image, text in loader:
        i, t, _ = model(image, text)
        i, t = accelerator.gather_for_metrics((i, t))
        images.append(i)
        texts.append(t)
    model.train()
    images, texts = torch.cat(images), torch.cat(texts)
    top = (images @ texts.t()).argmax(1)
    return (top == torch.arange(len(images))).float().mean().item(), len(images)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(15)
    train_loader = DataLoader(pairs(2048, 0), batch_size=32, shuffle=True, drop_last=True)
    test_loader = DataLoader(pairs(150, 1), batch_size=32)
    model = TwoTower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    for epoch in range(3):
        for image, text in train_loader:
            loss = clip_loss(*model(image, text))
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        r1, n = retrieval(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch} last loss {loss.item():.4f} R@1 {r1:.3f} of {n}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
