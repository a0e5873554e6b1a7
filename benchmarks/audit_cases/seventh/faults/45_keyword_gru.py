"""Keyword spotting on noisy log-mel frames. A few recordings are broken, so bad batches are dropped."""
import torch
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

WORDS, MELS, FRAMES = 5, 20, 30


class Clips(Dataset):
    def __init__(self, n, seed, broken=0.0):
        gen = torch.Generator().manual_seed(seed)
        shapes = torch.randn(WORDS, FRAMES, MELS, generator=torch.Generator().manual_seed(99))
        self.labels = torch.randint(WORDS, (n,), generator=gen)
        self.clips = shapes[self.labels] * 0.5 + torch.randn(n, FRAMES, MELS, generator=gen)
        bad = torch.rand(n, generator=gen) < broken
        self.clips[bad] = torch.log(torch.zeros(FRAMES, MELS))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"frames": self.clips[i], "labels": self.labels[i]}


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(MELS)
        self.gru = nn.GRU(MELS, 48, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, WORDS)

    def forward(self, frames, labels=None):
        h, _ = self.gru(self.norm(frames))
        logits = self.head(h.mean(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class RobustTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dropped = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        if not torch.isfinite(loss):
            self.dropped += 1
            return torch.zeros((), device=loss.device)
        self.accelerator.backward(loss)
        return loss.detach()


def accuracy(pred):
    return {"accuracy": (pred.predictions.argmax(-1) == pred.label_ids).mean()}


def main():
    set_seed(31)
    args = TrainingArguments(
        output_dir="keyword-gru", use_cpu=True, num_train_epochs=2, per_device_train_batch_size=8,
        per_device_eval_batch_size=32, learning_rate=3e-3, eval_strategy="epoch", logging_steps=10,
        save_strategy="no", report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False, seed=31,
    )
    trainer = RobustTrainer(
        model=Spotter(), args=args, train_dataset=Clips(640, seed=1, broken=0.01),
        eval_dataset=Clips(128, seed=2), compute_metrics=accuracy,
    )
    trainer.train()
    print(f"process {args.process_index}: {trainer.dropped} batches dropped")
    trainer.save_model("keyword-gru/final")


if __name__ == "__main__":
    main()
