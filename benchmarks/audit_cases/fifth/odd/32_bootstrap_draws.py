"""Rare-event classifier: every rank draws its own bootstrap batches, with replacement, from the whole set."""
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

VOCAB, LENGTH = 32, 10


class Events(Dataset):
    def __init__(self, size, seed):
        rng = np.random.default_rng(seed)
        y = (rng.random(size) < 0.1).astype(np.int64)
        x = rng.integers(4, VOCAB, (size, LENGTH))
        x[y == 1, :3] = rng.integers(0, 4, (int(y.sum()), 3))
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


class BootstrapTrainer(Trainer):
    def get_train_dataloader(self):
        y = self.train_dataset.y
        weight = 1.0 / torch.bincount(y, minlength=2).double()
        generator = torch.Generator().manual_seed(1000 * self.args.seed + self.args.process_index)
        sampler = WeightedRandomSampler(
            weight[y], num_samples=len(y) // self.args.world_size, replacement=True, generator=generator
        )
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
            drop_last=True,
        )


def balanced_accuracy(pred):
    guess = pred.predictions.argmax(-1)
    rates = [float((guess[pred.label_ids == c] == c).mean()) for c in (0, 1)]
    return {"balanced_accuracy": sum(rates) / 2}


def main():
    set_seed(6)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=2,
    )
    args = TrainingArguments(
        output_dir="events",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=2e-3,
        eval_strategy="epoch",
        save_strategy="no",
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = BootstrapTrainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=Events(640, seed=0),
        eval_dataset=Events(256, seed=1),
        compute_metrics=balanced_accuracy,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"balanced accuracy {metrics['eval_balanced_accuracy']:.3f}")


if __name__ == "__main__":
    main()
