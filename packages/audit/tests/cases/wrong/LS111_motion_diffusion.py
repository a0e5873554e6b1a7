"""Denoising diffusion on short 2-D pen trajectories."""
import math

import torch
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

LENGTH, STEPS = 24, 50


class Strokes(Dataset):
    """Circles and figure-eights with a random size and phase."""

    def __init__(self, n, seed):
        gen = torch.Generator().manual_seed(seed)
        t = torch.linspace(0, 2 * math.pi, LENGTH)
        size, phase = 0.5 + torch.rand(n, 1, generator=gen), 6.28 * torch.rand(n, 1, generator=gen)
        turns = 1 + torch.randint(2, (n, 1), generator=gen)
        self.paths = torch.stack([size * torch.cos(t + phase), size * torch.sin(turns * (t + phase))], dim=1)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return {"path": self.paths[i]}


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Embedding(STEPS, width)
        self.inp = nn.Conv1d(2, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv1d(width, width, 5, padding=2)) for _ in range(3)
        )
        self.out = nn.Conv1d(width, 2, 3, padding=1)

    def forward(self, noisy, t):
        h = self.inp(noisy) + self.time(t).unsqueeze(-1)
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


class DiffusionTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        betas = torch.linspace(1e-3, 0.15, STEPS)
        self.alpha_bar = torch.cumprod(1 - betas, dim=0).to(self.args.device)
        self.noise_gen = torch.Generator().manual_seed(self.args.seed)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        x0 = inputs["path"]
        t = torch.randint(STEPS, (len(x0),), generator=self.noise_gen).to(x0.device)
        eps = torch.randn(x0.shape, generator=self.noise_gen).to(x0.device)
        a = self.alpha_bar[t].view(-1, 1, 1)
        pred = model(a.sqrt() * x0 + (1 - a).sqrt() * eps, t)
        loss = nn.functional.mse_loss(pred, eps)
        return (loss, {"loss": loss}) if return_outputs else loss


@torch.no_grad()
def sample(model, alpha_bar, n=4):
    x = torch.randn(n, 2, LENGTH)
    for k in reversed(range(STEPS)):
        prev = alpha_bar[k - 1] if k else torch.tensor(1.0)
        eps = model(x, torch.full((n,), k))
        x0 = (x - (1 - alpha_bar[k]).sqrt() * eps) / alpha_bar[k].sqrt()
        x = prev.sqrt() * x0.clamp(-2, 2) + (1 - prev).sqrt() * eps
    return x


def main():
    set_seed(29)
    args = TrainingArguments(
        output_dir="stroke-diffusion", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        learning_rate=2e-3, lr_scheduler_type="cosine", logging_steps=10, dataloader_drop_last=True,
        save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False, seed=29,
    )
    trainer = DiffusionTrainer(model=Denoiser(), args=args, train_dataset=Strokes(960, seed=1))
    trainer.train()
    if trainer.is_world_process_zero():
        paths = sample(trainer.model.eval(), trainer.alpha_bar.cpu())
        print("sampled extent", paths.abs().amax((1, 2)).tolist())


if __name__ == "__main__":
    main()
