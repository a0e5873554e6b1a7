"""Route support tickets to four queues; the queues are very unbalanced, so draw by class weight."""
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, default_data_collator, set_seed

QUEUES = ["billing", "login", "shipping", "legal"]
PRIOR = [0.62, 0.24, 0.11, 0.03]


class Tickets(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.labels = rng.choice(len(QUEUES), size=n, p=PRIOR)
        ids = rng.integers(40, 200, size=(n, 16))
        ids[:, 0] = 1
        for i, y in enumerate(self.labels):
            places = rng.choice(np.arange(1, 16), size=3, replace=False)
            ids[i, places] = 5 + y * 8 + rng.integers(0, 8, size=3)
        self.ids = torch.tensor(ids)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": int(self.labels[i])}


class BalancedTrainer(Trainer):
    def get_train_dataloader(self):
        labels = self.train_dataset.labels
        counts = np.bincount(labels, minlength=len(QUEUES))
        weights = 1.0 / counts[labels]
        sampler = WeightedRandomSampler(weights.tolist(), num_samples=len(labels), replacement=True)
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
            drop_last=True,
        )


def compute_metrics(pred):
    guess = pred.predictions.argmax(-1)
    recalls = [
        float((guess[pred.label_ids == c] == c).mean()) for c in range(len(QUEUES)) if (pred.label_ids == c).any()
    ]
    return {"balanced_accuracy": float(np.mean(recalls))}


def main():
    set_seed(13)
    config = BertConfig(
        vocab_size=200,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        num_labels=len(QUEUES),
    )
    args = TrainingArguments(
        output_dir="router",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=1e-3,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="no",
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
        seed=13,
    )
    trainer = BalancedTrainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=Tickets(640, 0),
        eval_dataset=Tickets(200, 1),
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
