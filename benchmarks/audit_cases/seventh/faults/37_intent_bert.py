"""Intent classification for a voice assistant: tiny BERT, class-weighted loss."""
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

INTENTS = ["play_music", "set_alarm", "weather", "small_talk"]
FREQ = [0.5, 0.3, 0.15, 0.05]
VOCAB = 200


class Utterances(Dataset):
    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.items = []
        for _ in range(n):
            label = rng.choices(range(len(INTENTS)), FREQ)[0]
            length = rng.randint(6, 14)
            ids = [rng.randrange(10, VOCAB) for _ in range(length)]
            for pos in rng.sample(range(length), 3):
                ids[pos] = 10 + label * 20 + rng.randrange(20)
            self.items.append((ids, label))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        ids, label = self.items[i]
        return {"input_ids": ids, "labels": label}


def collate(batch):
    width = max(len(b["input_ids"]) for b in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, b in enumerate(batch):
        ids[row, : len(b["input_ids"])] = torch.tensor(b["input_ids"])
        mask[row, : len(b["input_ids"])] = 1
    labels = torch.tensor([b["labels"] for b in batch])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = self.model(**inputs)
        per_item = F.cross_entropy(outputs.logits, labels, weight=self.class_weights.to(labels.device), reduction="none")
        loss = per_item.mean()
        inputs["labels"] = labels
        return (loss, outputs) if return_outputs else loss


def compute_metrics(pred):
    guess = pred.predictions.argmax(-1)
    recalls = [(guess[pred.label_ids == c] == c).mean() for c in np.unique(pred.label_ids)]
    return {"accuracy": (guess == pred.label_ids).mean(), "macro_recall": float(np.mean(recalls))}


def main():
    set_seed(13)
    train_set, val_set = Utterances(640, seed=1), Utterances(160, seed=2)
    counts = np.bincount([label for _, label in train_set.items], minlength=len(INTENTS))
    weights = torch.tensor(counts.sum() / (len(INTENTS) * counts), dtype=torch.float)

    config = BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, num_labels=len(INTENTS), max_position_embeddings=32)
    args = TrainingArguments(
        output_dir="intent-bert", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=2e-3, eval_strategy="epoch", logging_steps=10,
        save_strategy="no", report_to=[], disable_tqdm=True, seed=13,
    )
    trainer = WeightedTrainer(
        model=BertForSequenceClassification(config), args=args, train_dataset=train_set, eval_dataset=val_set,
        data_collator=collate, compute_metrics=compute_metrics, class_weights=weights,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print({k: round(v, 4) for k, v in metrics.items() if "runtime" not in k})
    trainer.save_model("intent-bert/final")


if __name__ == "__main__":
    main()
