"""Streaming regression on sensor windows read from a (synthetic) recording."""
import os

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

WINDOW = 24
N_WINDOWS = 768
BATCH = 16
EPOCHS = 3


def record(n, seed):
    g = torch.Generator().manual_seed(seed)
    steps = torch.randn(n + WINDOW + 1, 3, generator=g) * 0.2
    trace = torch.zeros(n + WINDOW + 1, 3)
    for t in range(1, len(trace)):
        trace[t] = 0.85 * trace[t - 1] + 0.1 * torch.roll(trace[t - 1], 1) + steps[t]
    return trace


class WindowStream(IterableDataset):
    """Yields (window, next value) pairs in a new order in each epoch."""

    def __init__(self, trace, n):
        self.trace = trace
        self.n = n
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(100 + self.epoch)
        starts = range(self.n)
        for k in torch.randperm(len(starts), generator=g).tolist():
            start = starts[k]
            yield {
                "window": self.trace[start : start + WINDOW],
                "labels": self.trace[start + WINDOW],
            }


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(3, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 3)

    def forward(self, window, labels=None):
        _, h = self.rnn(window)
        pred = self.out(h[-1])
        result = {"pred": pred}
        if labels is not None:
            result["loss"] = nn.functional.mse_loss(pred, labels)
        return result


def main():
    trace = record(N_WINDOWS, seed=3)
    args = TrainingArguments(
        output_dir="runs/sensor",
        use_cpu=True,
        max_steps=EPOCHS * N_WINDOWS // (BATCH * WORLD_SIZE),
        per_device_train_batch_size=BATCH,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=6,
        logging_steps=12,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        seed=11,
    )
    trainer = Trainer(
        model=Forecaster(),
        args=args,
        train_dataset=WindowStream(trace, N_WINDOWS),
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"steps {result.global_step}  mean training loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
