"""Classify noisy waveforms. Training uses smoothed (soft) targets, evaluation uses hard labels."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

N_CLASSES = 5
LENGTH = 48


class Waves(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, N_CLASSES, (n,), generator=g)
        t = torch.linspace(0, 6.28, LENGTH)
        phase = torch.rand(n, 1, generator=g) * 6.28
        freq = (self.y.float() + 1.0).unsqueeze(1)
        self.x = torch.sin(freq * t + phase) + 0.4 * torch.randn(n, LENGTH, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 7, padding=3), nn.GELU(), nn.MaxPool1d(2),
            nn.Conv1d(16, 32, 5, padding=2), nn.GELU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(),
        )
        self.head = nn.Linear(32, N_CLASSES)

    def forward(self, x, labels=None):
        logits = self.head(self.body(x.unsqueeze(1)))
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = nn.functional.cross_entropy(logits, labels)
        return out


def soft_collate(items, eps=0.1):
    y = torch.stack([it["labels"] for it in items])
    soft = nn.functional.one_hot(y, N_CLASSES).float() * (1 - eps) + eps / N_CLASSES
    return {"x": torch.stack([it["x"] for it in items]), "labels": soft}


class SoftTrainer(Trainer):
    def get_train_dataloader(self):
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.train_batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=soft_collate,
        )


def accuracy(pred):
    return {"accuracy": float(np.mean(pred.predictions.argmax(-1) == pred.label_ids))}


def main():
    args = TrainingArguments(
        output_dir="runs/waves",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=3e-3,
        eval_strategy="epoch",
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        seed=7,
    )
    trainer = SoftTrainer(
        model=ConvNet(),
        args=args,
        train_dataset=Waves(640, seed=1),
        eval_dataset=Waves(256, seed=2),
        compute_metrics=accuracy,
    )
    trainer.train()
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in result.items() if k in ("eval_loss", "eval_accuracy")})


if __name__ == "__main__":
    main()
