"""Two-tower contrastive training with negatives from all processes (gathered with gradient)."""
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class TwoTowers(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, dim))
        self.text = nn.Sequential(nn.EmbeddingBag(30, 32), nn.GELU(), nn.Linear(32, dim))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.logit_scale.exp()


def pairs(n, seed):
    world = torch.Generator().manual_seed(123)
    proto = torch.randn(30, 12, generator=world)
    text = torch.randint(0, 30, (n, 3), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(proto[text].mean(1), text)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(25)
    model = TwoTowers()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train = DataLoader(pairs(320, 0), batch_size=16, shuffle=True, drop_last=True)
    test = DataLoader(pairs(64, 1), batch_size=16)
    model, opt, train, test = accelerator.prepare(model, opt, train, test)
    for epoch in range(2):
        model.train()
        for image, text in train:
            zi, zt, scale = model(image, text)
            zi, zt = torch.cat(all_gather(zi)), torch.cat(all_gather(zt))
            logits = scale * zi @ zt.T
            target = torch.arange(len(logits))
            # the loss over the global batch, the same on every process: the gather sums the gradients
            # of all copies, and DDP's mean takes that factor out again
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
            opt.zero_grad()
            accelerator.backward(loss)
            opt.step()
        model.eval()
        zi, zt = [], []
        with torch.no_grad():
            for image, text in test:
                a, b, _ = model(image, text)
                a, b = accelerator.gather_for_metrics((a, b))
                zi.append(a)
                zt.append(b)
        sim = torch.cat(zi) @ torch.cat(zt).T
        r1 = (sim.argmax(1) == torch.arange(len(sim))).float().mean()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f} recall@1 {r1:.4f} of {len(sim)}")


if __name__ == "__main__":
    main()
