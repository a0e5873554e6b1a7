"""Electric load forecast that trains until a time budget is spent; the ranks agree on the last step."""
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

HOURS = 48


class LoadCurves(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        hours = torch.arange(HOURS + 1).float()
        phase = torch.rand(n, 1, generator=g) * 2 * math.pi
        level = torch.rand(n, 1, generator=g)
        curve = level + torch.sin(hours * 2 * math.pi / 24 + phase) + 0.1 * torch.randn(n, HOURS + 1, generator=g)
        self.past, self.next = curve[:, :-1], curve[:, -1]

    def __len__(self):
        return len(self.next)

    def __getitem__(self, i):
        return {"past": self.past[i], "labels": self.next[i]}


class LoadNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(HOURS, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, past, labels=None):
        value = self.net(past).squeeze(-1)
        loss = None if labels is None else nn.functional.mse_loss(value, labels)
        return {"loss": loss, "logits": value}


class TimeBudget(TrainerCallback):
    """Clocks of the ranks differ, so every few steps they ask whether any of them is over its time."""

    def __init__(self, seconds, every=5):
        self.seconds = seconds
        self.every = every
        self.start = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every:
            return
        over = torch.tensor([int(time.monotonic() - self.start > self.seconds)], device=args.device)
        if dist.is_initialized():
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
        if over.item():
            control.should_training_stop = True


def rmse(pred):
    return {"rmse": float(((pred.predictions - pred.label_ids) ** 2).mean() ** 0.5)}


def main():
    set_seed(19)
    args = TrainingArguments(
        output_dir="out_load", use_cpu=True, num_train_epochs=20, per_device_train_batch_size=32,
        per_device_eval_batch_size=32, learning_rate=3e-3, lr_scheduler_type="constant", eval_strategy="no",
        save_strategy="no", logging_steps=20, report_to="none", disable_tqdm=True, seed=19,
    )
    trainer = Trainer(
        model=LoadNet(), args=args, train_dataset=LoadCurves(1024, 0), eval_dataset=LoadCurves(256, 1),
        compute_metrics=rmse, callbacks=[TimeBudget(seconds=4.0)],
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps, rmse {metrics['eval_rmse']:.3f}")


if __name__ == "__main__":
    main()
