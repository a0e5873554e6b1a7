"""Star rating of short product reviews; a held-out domain is scored during training."""
import json

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

VOCAB, LENGTH, STARS = 120, 16, 5


class Reviews(Dataset):
    def __init__(self, n, domain, seed):
        rng = np.random.default_rng(seed)
        self.stars = rng.integers(0, STARS, size=n)
        tokens = rng.integers(20, VOCAB, size=(n, LENGTH))
        for row, star in zip(tokens, self.stars):
            where = rng.choice(LENGTH, size=4, replace=False)
            row[where] = 2 + star * 3 + rng.integers(0, 3, size=4) + (1 if domain == "books" else 0)
        self.tokens = torch.from_numpy(tokens)

    def __len__(self):
        return len(self.stars)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": int(self.stars[i])}


def compute_metrics(pred):
    guess = pred.predictions.argmax(-1)
    return {
        "accuracy": float((guess == pred.label_ids).mean()),
        "mae": float(np.abs(guess - pred.label_ids).mean()),
    }


class DomainScore(TrainerCallback):
    """Scores a second test set after every epoch and keeps the curve in a file."""

    def __init__(self, dataset, path):
        self.dataset = dataset
        self.path = path
        self.trainer = None
        self.curve = []

    def on_epoch_end(self, args, state, control, **kwargs):
        scores = self.trainer.evaluate(self.dataset, metric_key_prefix="books")
        if state.is_world_process_zero:
            self.curve.append({"epoch": state.epoch, "accuracy": scores["books_accuracy"]})
            with open(self.path, "w") as f:
                json.dump(self.curve, f)


def main():
    config = DistilBertConfig(
        vocab_size=VOCAB, max_position_embeddings=LENGTH, dim=48, n_layers=2, n_heads=4,
        hidden_dim=96, num_labels=STARS,
    )
    args = TrainingArguments(
        output_dir="out_reviews",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=2e-3,
        logging_steps=10,
        save_strategy="no",
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
    )
    domain_score = DomainScore(Reviews(160, "books", seed=2), "books_curve.json")
    trainer = Trainer(
        model=DistilBertForSequenceClassification(config),
        args=args,
        train_dataset=Reviews(480, "kitchen", seed=0),
        eval_dataset=Reviews(160, "kitchen", seed=1),
        compute_metrics=compute_metrics,
        callbacks=[domain_score],
    )
    domain_score.trainer = trainer
    trainer.train()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
