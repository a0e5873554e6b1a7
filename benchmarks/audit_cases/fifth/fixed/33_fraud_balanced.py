"""Fraud detection on card histories. Frauds are rare, so batches are balanced by a weighted sampler."""
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

MERCHANTS = 40
HISTORY = 12


class Cards(Dataset):
    def __init__(self, size, seed, fraud_rate=0.08):
        rng = np.random.default_rng(seed)
        y = (rng.random(size) < fraud_rate).astype(np.int64)
        x = rng.integers(2, MERCHANTS, (size, HISTORY))
        for i in np.flatnonzero(y):
            spots = rng.choice(HISTORY, 4, replace=False)
            x[i, spots] = rng.integers(MERCHANTS - 6, MERCHANTS, 4)
        self.x = torch.from_numpy(x)
        self.y = torch.from_numpy(y)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


class BalancedTrainer(Trainer):
    def get_train_dataloader(self):
        y = self.train_dataset.y
        per_class = 1.0 / torch.bincount(y, minlength=2).double()
        sampler = WeightedRandomSampler(
            per_class[y],
            num_samples=len(y),
            replacement=True,
            generator=torch.Generator().manual_seed(self.args.seed),
        )
        loader = DataLoader(
            self.train_dataset,
            batch_size=self.args.train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
        )
        return self.accelerator.prepare(loader)


def scores(pred):
    guess = pred.predictions.argmax(-1)
    hit = np.sum((guess == 1) & (pred.label_ids == 1))
    recall = hit / max(1, np.sum(pred.label_ids == 1))
    precision = hit / max(1, np.sum(guess == 1))
    return {"recall": float(recall), "precision": float(precision)}


def main():
    set_seed(5)
    config = BertConfig(
        vocab_size=MERCHANTS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=HISTORY, num_labels=2,
    )
    args = TrainingArguments(
        output_dir="fraud",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=1e-3,
        eval_strategy="epoch",
        logging_steps=10,
        save_strategy="no",
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = BalancedTrainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=Cards(640, seed=0),
        eval_dataset=Cards(256, seed=1),
        compute_metrics=scores,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print({k: round(v, 3) for k, v in metrics.items() if k in ("eval_recall", "eval_precision")})


if __name__ == "__main__":
    main()
