import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

Z = 8


def ring(n, seed):
    g = torch.Generator().manual_seed(seed)
    k = torch.randint(0, 6, (n,), generator=g) * (2 * torch.pi / 6)
    centers = torch.stack([k.cos(), k.sin()], dim=1)
    return TensorDataset(centers + 0.05 * torch.randn(n, 2, generator=g))


def mlp(i, o, width=64):
    return nn.Sequential(
        nn.Linear(i, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, o)
    )


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(3, device_specific=True)
    loader = DataLoader(ring(2048, 0), batch_size=64, shuffle=True, drop_last=True)
    gen, disc = mlp(Z, 2), mlp(2, 1)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.5, 0.99))
    gen, disc, opt_g, opt_d, loader = accelerator.prepare(gen, disc, opt_g, opt_d, loader)
    raw_disc = accelerator.unwrap_model(disc)

    step = 0
    for epoch in range(4):
        sums = torch.zeros(2)
        for (real,) in loader:
            step += 1
            with torch.no_grad():
                fake = accelerator.unwrap_model(gen)(torch.randn(len(real), Z))
            scores = disc(torch.cat([real, fake]))
            loss_d = F.softplus(-scores[: len(real)]).mean() + F.softplus(scores[len(real):]).mean()
            opt_d.zero_grad()
            accelerator.backward(loss_d)
            opt_d.step()
            sums[0] += loss_d.detach()

            if step % 2 == 0:
                # the critic acts as a fixed function here: its weights enter as constants
                weights = {k: v.detach() for k, v in raw_disc.named_parameters()}
                fake = gen(torch.randn(len(real), Z))
                loss_g = F.softplus(-functional_call(raw_disc, weights, (fake,))).mean()
                opt_g.zero_grad()
                accelerator.backward(loss_g)
                opt_g.step()
                sums[1] += loss_g.detach()
        d, g = accelerator.reduce(sums, reduction="mean").tolist()
        accelerator.print(f"epoch {epoch} d {d / len(loader):.4f} g {2 * g / len(loader):.4f}")

    if accelerator.is_main_process:
        with torch.no_grad():
            points = accelerator.unwrap_model(gen)(torch.randn(500, Z))
        print(f"mean radius of samples {points.norm(dim=1).mean():.3f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
