"""Classify points on spirals; after each epoch a confusion matrix of a test set is added to a report."""
import math
import os

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

ARMS = 3


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    arm = torch.randint(0, ARMS, (n,), generator=g)
    r = torch.rand(n, generator=g).sqrt()
    angle = 3.5 * r + arm * 2 * math.pi / ARMS + 0.12 * torch.randn(n, generator=g)
    points = torch.stack([r * angle.cos(), r * angle.sin()], dim=1)
    return TensorDataset(points, arm)


def collate(items):
    points, arm = zip(*items)
    return {"points": torch.stack(points), "labels": torch.stack(arm)}


class SpiralNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, ARMS)
        )

    def forward(self, points, labels=None):
        logits = self.net(points)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class ConfusionReport(TrainerCallback):
    def __init__(self, dataset, path):
        self.dataset = dataset
        self.path = path
        self.trainer = None

    def on_epoch_end(self, args, state, control, **kwargs):
        output = self.trainer.predict(self.dataset)
        if state.is_world_process_zero:
            guess = output.predictions.argmax(-1)
            matrix = np.zeros((ARMS, ARMS), dtype=int)
            np.add.at(matrix, (output.label_ids, guess), 1)
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(self.path, "a") as f:
                f.write(f"epoch {state.epoch:.0f}\n{matrix}\n")


def main():
    set_seed(2)
    args = TrainingArguments(
        output_dir="runs/spirals",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=5e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        seed=2,
    )
    report = ConfusionReport(spirals(192, 2), os.path.join(args.output_dir, "confusion.txt"))
    trainer = Trainer(
        model=SpiralNet(),
        args=args,
        train_dataset=spirals(640, 1),
        data_collator=collate,
        callbacks=[report],
    )
    report.trainer = trainer
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"finished after {result.global_step} steps, training loss {result.training_loss:.3f}")


if __name__ == "__main__":
    main()
