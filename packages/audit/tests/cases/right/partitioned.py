"""Each process prepares and trains on its own partition of a table (one file per process, read only by that process)."""
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments, set_seed

FEATURES, ROWS_PER_PART = 10, 320


def true_value(x):
    return torch.sin(x[:, 0] * 2) + x[:, 1] * x[:, 2] - 0.5 * x[:, 3].abs()


def build_partition(folder, part):
    """Simulates the extraction of one partition; the other processes never open this file."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"part-{part:03d}.pt")
    g = torch.Generator().manual_seed(1000 + part)
    x = torch.randn(ROWS_PER_PART, FEATURES, generator=g)
    torch.save({"x": x, "y": true_value(x) + 0.1 * torch.randn(len(x), generator=g)}, path)
    return path


def load_partition(path):
    table = torch.load(path)
    return TensorDataset(table["x"], table["y"])


def collate(rows):
    x, y = zip(*rows)
    return {"x": torch.stack(x), "labels": torch.stack(y)}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x, labels=None):
        pred = self.net(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(pred, labels), "pred": pred}


class PartitionTrainer(Trainer):
    def get_train_dataloader(self):
        # the dataset is this process's partition only, so there is nothing left to split
        order = torch.Generator().manual_seed(self.args.seed + 17 * self.args.process_index)
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            shuffle=True,
            generator=order,
            drop_last=True,
            collate_fn=collate,
        )


def main():
    set_seed(8)
    args = TrainingArguments(
        output_dir="runs/table", use_cpu=True, num_train_epochs=4, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=3e-3, eval_strategy="epoch", logging_steps=20,
        save_strategy="no", report_to="none", dataloader_pin_memory=False, remove_unused_columns=False, seed=8,
    )
    mine = load_partition(build_partition("partitions", args.process_index))
    g = torch.Generator().manual_seed(5)
    x = torch.randn(256, FEATURES, generator=g)
    trainer = PartitionTrainer(
        model=Mlp(), args=args, train_dataset=mine, eval_dataset=TensorDataset(x, true_value(x)), data_collator=collate,
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"held-out mse {scores['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
