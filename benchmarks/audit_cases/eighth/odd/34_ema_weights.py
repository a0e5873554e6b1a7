"""Evaluate with an exponential moving average of the weights; training goes on with the raw weights afterwards."""
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Denoise(Dataset):
    """Recover a smooth curve from noisy samples of it."""

    def __init__(self, n, seed, length=32):
        g = torch.Generator().manual_seed(seed)
        t = torch.linspace(0, 1, length)
        a = torch.randn(n, 3, 1, generator=g)
        k = torch.arange(1, 4).view(1, 3, 1)
        self.clean = (a * torch.sin(6.28 * k * t)).sum(1) / 3
        self.noisy = self.clean + 0.4 * torch.randn(n, length, generator=g)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        return {"noisy": self.noisy[i], "labels": self.clean[i]}


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, width, 9, padding=4), nn.GELU(), nn.Conv1d(width, width, 9, padding=4), nn.GELU(),
            nn.Conv1d(width, 1, 9, padding=4),
        )

    def forward(self, noisy, labels=None):
        out = self.net(noisy.unsqueeze(1)).squeeze(1)
        return {"loss": nn.functional.mse_loss(out, labels), "out": out}


class Ema(TrainerCallback):
    # every process keeps the same average: the weights are the same everywhere after each optimizer step
    def __init__(self, decay=0.95):
        self.decay, self.shadow = decay, None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.shadow = {k: p.detach().clone() for k, p in model.named_parameters()}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        decay = min(self.decay, (1 + state.global_step) / (10 + state.global_step))
        with torch.no_grad():
            for k, p in model.named_parameters():
                self.shadow[k].lerp_(p, 1 - decay)

    @torch.no_grad()
    def swap(self, model):
        for k, p in model.named_parameters():
            raw = p.detach().clone()
            p.copy_(self.shadow[k])
            self.shadow[k].copy_(raw)


class EmaTrainer(Trainer):
    def __init__(self, *args, ema, **kwargs):
        super().__init__(*args, callbacks=[ema], **kwargs)
        self.ema = ema

    def evaluate(self, *args, **kwargs):
        self.ema.swap(self.model)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self.ema.swap(self.model)


def main():
    set_seed(12)
    args = TrainingArguments(
        output_dir="runs/denoise", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=4e-3, eval_strategy="epoch", logging_steps=8,
        save_strategy="no", report_to="none", dataloader_pin_memory=False, seed=12,
    )
    trainer = EmaTrainer(
        ema=Ema(), model=Denoiser(), args=args, train_dataset=Denoise(512, 1), eval_dataset=Denoise(128, 2)
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"mse with averaged weights {scores['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
