"""Gradient surgery (PCGrad) for two tasks: gradients are averaged over the processes by hand, task by task, before the projection."""
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    a = (x[:, :8].sum(1) > 0).float()
    b = x[:, 4:12].sum(1) - 2 * x[:, 0].abs()
    return TensorDataset(x, a, b)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(32, 1), nn.Linear(32, 1)])

    def forward(self, x):
        h = self.trunk(x)
        return [head(h).squeeze(-1) for head in self.heads]


def flat_gradient(accelerator, loss, params):
    grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(params, grads)])
    return accelerator.reduce(flat, reduction="mean")


def surgery(ga, gb):
    dot = ga @ gb
    if dot >= 0:
        return ga + gb
    return ga - dot / (gb @ gb) * gb + gb - dot / (ga @ ga) * ga


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(55)
    loader = accelerator.prepare(DataLoader(make(1024, 1), batch_size=32, shuffle=True))
    model = Shared().to(accelerator.device)
    params = list(model.parameters())
    for p in params:
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.Adam(params, lr=3e-3)

    for epoch in range(3):
        logs, conflicts = torch.zeros(2), 0
        for x, a, b in loader:
            out_a, out_b = model(x)
            losses = [nn.functional.binary_cross_entropy_with_logits(out_a, a), nn.functional.mse_loss(out_b, b)]
            ga, gb = [flat_gradient(accelerator, loss, params) for loss in losses]
            conflicts += int(ga @ gb < 0)
            offset, merged = 0, surgery(ga, gb)
            for p in params:
                p.grad = merged[offset : offset + p.numel()].view_as(p).clone()
                offset += p.numel()
            optimizer.step()
            logs += torch.stack(losses).detach()
        logs = accelerator.reduce(logs / len(loader), reduction="mean")
        accelerator.print(f"epoch {epoch}: bce {logs[0]:.3f} mse {logs[1]:.3f}, {conflicts} conflicts in {len(loader)} steps")

    accelerator.wait_for_everyone()
    accelerator.save(model.state_dict(), "pcgrad.pt")


if __name__ == "__main__":
    main()
