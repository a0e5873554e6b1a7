"""Denoising of 1-d signals with a weight average for evaluation."""
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
DECAY, STEPS, EVAL_EVERY = 0.97, 60, 20


def clean(n, gen):
    t = torch.linspace(0, 1, 64)
    a, f = torch.rand(n, 1, generator=gen), 1 + 4 * torch.rand(n, 1, generator=gen)
    return (0.5 + a) * torch.sin(6.283 * f * t)


class Denoiser(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, ch, 9, padding=4), nn.GELU(), nn.Conv1d(ch, ch, 9, padding=4),
                                  nn.GELU(), nn.Conv1d(ch, 1, 9, padding=4))

    def forward(self, x):
        return self.body(x[:, None])[:, 0]


class Ema:
    def __init__(self, model, decay):
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.model.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


@torch.no_grad()
def evaluate(model, rank, world):
    gen = torch.Generator().manual_seed(777)
    x = clean(200, gen)
    noisy = x + 0.4 * torch.randn(x.shape, generator=gen)
    err = (model(noisy[rank::world]) - x[rank::world]).square().mean(1).sum()
    dist.all_reduce(err)
    return err.item() / len(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(60 + rank)
    gen = torch.Generator().manual_seed(5000 + rank)
    net = Denoiser()
    ddp = DDP(net)
    ema = Ema(net, DECAY)
    opt = torch.optim.Adam(ddp.parameters(), lr=5e-3)
    for step in range(1, STEPS + 1):
        x = clean(32, gen)
        noisy = x + 0.4 * torch.randn_like(x)
        loss = (ddp(noisy) - x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(net)
        if step % EVAL_EVERY == 0:
            plain, avg = evaluate(net, rank, world), evaluate(ema.model, rank, world)
            if rank == 0:
                print(f"step {step} plain {plain:.5f} average {avg:.5f}", flush=True)
    w = sum(p.double().abs().sum().item() for p in ema.model.parameters())
    print(f"[{rank}] average weights {w:.6f}", flush=True)
    if rank == 0:
        torch.save(ema.model.state_dict(), "denoiser_ema.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
