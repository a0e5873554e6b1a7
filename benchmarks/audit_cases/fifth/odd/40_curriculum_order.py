"""Curriculum: short sentences first, with some jitter that changes from epoch to epoch."""
import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

VOCAB = 40


class Sentences(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 2, (size,), generator=g).tolist()
        self.ids = []
        for y in self.labels:
            n = int(torch.randint(4, 20, (1,), generator=g))
            ids = torch.randint(6, VOCAB, (n,), generator=g)
            ids[torch.randint(0, n, (1,), generator=g)] = 2 + y
            self.ids.append(ids)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "label": self.labels[i]}


def pad(rows):
    width = max(len(r["input_ids"]) for r in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for k, r in enumerate(rows):
        ids[k, : len(r["input_ids"])] = r["input_ids"]
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([r["label"] for r in rows]),
    }


class ShortFirst(Sampler):
    """The order depends on lengths, seed and epoch only; the Trainer deals the batches out to the ranks."""

    def __init__(self, lengths, seed, jitter=6.0):
        self.lengths, self.seed, self.jitter, self.epoch = np.asarray(lengths), seed, jitter, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        rng = np.random.default_rng([self.seed, self.epoch])
        spread = self.jitter * (1 + self.epoch)
        return iter(np.argsort(self.lengths + spread * rng.random(len(self.lengths))).tolist())


class CurriculumTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        data = train_dataset if train_dataset is not None else self.train_dataset
        return ShortFirst([len(x) for x in data.ids], self.args.seed)


def accuracy(pred):
    return {"accuracy": float(np.mean(pred.predictions.argmax(-1) == pred.label_ids))}


def main():
    set_seed(19)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=24, num_labels=2,
    )
    args = TrainingArguments(
        output_dir="curriculum", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=2e-3, eval_strategy="epoch", save_strategy="no",
        report_to="none", disable_tqdm=True, remove_unused_columns=False, average_tokens_across_devices=False,
    )
    trainer = CurriculumTrainer(
        model=BertForSequenceClassification(config), args=args, train_dataset=Sentences(512, 0),
        eval_dataset=Sentences(128, 1), data_collator=pad, compute_metrics=accuracy,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {metrics['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
