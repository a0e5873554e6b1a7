"""A small GAN for absorption spectra: two prepared models, two optimizers that step in turn."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

BINS, LATENT = 32, 8


def spectra(n, seed):
    gen = torch.Generator().manual_seed(seed)
    axis = torch.linspace(0, 1, BINS)
    centre = 0.25 + 0.5 * torch.rand(n, 1, generator=gen)
    width = 0.05 + 0.05 * torch.rand(n, 1, generator=gen)
    peaks = torch.exp(-((axis - centre) / width) ** 2)
    return TensorDataset(peaks + 0.02 * torch.randn(n, BINS, generator=gen))


def mlp(n_in, n_out, width=64):
    return nn.Sequential(
        nn.Linear(n_in, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, n_out)
    )


def main(epochs=3, batch_size=32, critic_steps=2):
    set_seed(31)
    accelerator = Accelerator(cpu=True)
    # own noise for each rank, so that the two halves of the global batch are different samples
    noise = torch.Generator().manual_seed(1000 + accelerator.process_index)
    loader = DataLoader(spectra(1280, 3), batch_size=batch_size, shuffle=True)
    generator, critic = mlp(LATENT, BINS), mlp(BINS, 1)
    g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    d_opt = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    generator, critic, g_opt, d_opt, loader = accelerator.prepare(generator, critic, g_opt, d_opt, loader)

    step = 0
    for epoch in range(epochs):
        d_total, g_total, g_count = torch.zeros(()), torch.zeros(()), 0
        for (real,) in loader:
            # critic: the fakes are constants here
            with torch.no_grad():
                fake = generator(torch.randn(len(real), LATENT, generator=noise))
            scores = critic(torch.cat([real, fake]))
            real_score, fake_score = scores.chunk(2)
            d_loss = F.softplus(-real_score).mean() + F.softplus(fake_score).mean()
            d_opt.zero_grad()
            accelerator.backward(d_loss)
            d_opt.step()
            d_total += d_loss.detach()
            step += 1

            # generator: every second step only; what this adds to the critic's gradients
            # is thrown away by d_opt.zero_grad() before the critic's next backward
            if step % critic_steps == 0:
                made = generator(torch.randn(len(real), LATENT, generator=noise))
                g_loss = F.softplus(-critic(made)).mean()
                g_opt.zero_grad()
                accelerator.backward(g_loss)
                g_opt.step()
                g_total += g_loss.detach()
                g_count += 1
        means = accelerator.reduce(torch.stack([d_total / len(loader), g_total / g_count]), reduction="mean")
        accelerator.print(f"epoch {epoch}: critic {means[0].item():.4f} generator {means[1].item():.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(generator).state_dict(), "generator.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
