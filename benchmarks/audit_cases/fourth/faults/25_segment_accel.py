import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class EMA:
    def __init__(self, model, decay=0.9):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)
        for e, b in zip(self.model.buffers(), model.buffers()):
            e.copy_(b)


def make_unet():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 1, 1),
    )


def squares(n, seed):
    g = torch.Generator().manual_seed(seed)
    imgs = 0.6 * torch.randn(n, 1, 16, 16, generator=g)
    masks = torch.zeros(n, 1, 16, 16)
    for i in range(n):
        r, c = torch.randint(0, 10, (2,), generator=g).tolist()
        masks[i, 0, r:r + 6, c:c + 6] = 1
    return TensorDataset(imgs + masks, masks)


def dice(logits, mask):
    p = (logits > 0).float()
    inter = (p * mask).sum((1, 2, 3))
    return 2 * inter / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1e-6)


accelerator = Accelerator(cpu=True)
set_seed(11)
net = make_unet()
ema = EMA(net)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
train_dl = DataLoader(squares(128, 0), batch_size=8, shuffle=True)
val_dl = DataLoader(squares(40, 1), batch_size=4)
net, opt, train_dl, val_dl = accelerator.prepare(net, opt, train_dl, val_dl)

for epoch in range(3):
    net.train()
    for img, mask in train_dl:
        loss = F.binary_cross_entropy_with_logits(net(img), mask)
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if accelerator.is_main_process:
            ema.update(accelerator.unwrap_model(net))
    scores = []
    with torch.no_grad():
        for img, mask in val_dl:
            scores.append(accelerator.gather_for_metrics(dice(ema.model(img), mask)))
    accelerator.print(f"epoch {epoch} loss {loss.item():.4f} ema dice {torch.cat(scores).mean().item():.5f}")

if accelerator.is_main_process:
    torch.save(ema.model.state_dict(), "ema.pt")
