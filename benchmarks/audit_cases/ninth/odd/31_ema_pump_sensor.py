"""Pump failure prediction; an exponential moving average of the weights is what gets evaluated."""
import copy

import torch
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

CHANNELS, WINDOW = 6, 20


class PumpWindows(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.signal = torch.randn(n, WINDOW, CHANNELS, generator=g)
        self.failing = (torch.rand(n, generator=g) < 0.4).long()
        drift = torch.linspace(0, 1.5, WINDOW)[None, :, None]
        self.signal[..., :2] += drift * self.failing[:, None, None]

    def __len__(self):
        return len(self.failing)

    def __getitem__(self, i):
        return {"signal": self.signal[i], "labels": self.failing[i]}


class PumpNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(CHANNELS, 32, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, signal, labels=None):
        hidden, _ = self.rnn(signal)
        logits = self.head(hidden[:, -1])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class WeightAverage(TrainerCallback):
    """Every rank keeps its own copy of the average; the weights are equal, so are the averages."""

    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.source = model
        self.average = None

    @torch.no_grad()
    def on_step_end(self, args, state, control, **kwargs):
        if self.average is None:
            self.average = copy.deepcopy(self.source.state_dict())
            return
        for name, value in self.source.state_dict().items():
            self.average[name].mul_(self.decay).add_(value, alpha=1 - self.decay)


class AveragedTrainer(Trainer):
    average = None

    def evaluate(self, *args, **kwargs):
        if self.average is None or self.average.average is None:
            return super().evaluate(*args, **kwargs)
        backup = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.average.average)
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self.model.load_state_dict(backup)


def accuracy(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def main():
    set_seed(4)
    args = TrainingArguments(
        output_dir="out_pump", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=3e-3, eval_strategy="epoch", save_strategy="no",
        logging_steps=10, report_to="none", disable_tqdm=True, seed=4,
    )
    model = PumpNet()
    average = WeightAverage(model)
    trainer = AveragedTrainer(
        model=model, args=args, train_dataset=PumpWindows(512, 0), eval_dataset=PumpWindows(128, 1),
        compute_metrics=accuracy, callbacks=[average],
    )
    trainer.average = average
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("averaged weights:", metrics["eval_accuracy"])


if __name__ == "__main__":
    main()
