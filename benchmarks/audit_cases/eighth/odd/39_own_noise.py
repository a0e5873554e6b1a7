"""Masked reconstruction: every process draws its own masks. The seeds differ on purpose, but only after the weights
were made and the (shared) order of the data was fixed."""
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

CHANNELS, STEPS = 4, 20


class Signals(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.linspace(0, 6.28, STEPS).view(1, STEPS, 1)
        f = torch.randint(1, 4, (n, 1, 1), generator=g).float()
        lag = torch.arange(CHANNELS).view(1, 1, CHANNELS) * 0.5
        self.x = torch.sin(f * t + lag) + 0.05 * torch.randn(n, STEPS, CHANNELS, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"signal": self.x[i]}


class MaskedModel(nn.Module):
    def __init__(self, width=32, share=0.3):
        super().__init__()
        self.share = share
        self.inp = nn.Linear(CHANNELS, width)
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.place = nn.Parameter(0.02 * torch.randn(STEPS, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.out = nn.Linear(width, CHANNELS)

    def forward(self, signal):
        hidden = torch.rand(signal.shape[:2]) < self.share
        h = torch.where(hidden.unsqueeze(-1), self.mask_token, self.inp(signal)) + self.place
        pred = self.out(self.block(h))
        error = (pred - signal).pow(2).mean(-1)
        return {"loss": error.mean(), "pred": pred}


class OwnSeed(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        seed = args.seed + 1000 * (1 + args.process_index)
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def main():
    set_seed(22)
    args = TrainingArguments(
        output_dir="runs/masked", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        learning_rate=3e-3, logging_steps=8, save_strategy="no", report_to="none", dataloader_pin_memory=False,
        seed=22, data_seed=22,
    )
    trainer = Trainer(model=MaskedModel(), args=args, train_dataset=Signals(512, 1), callbacks=[OwnSeed()])
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"reconstruction loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
