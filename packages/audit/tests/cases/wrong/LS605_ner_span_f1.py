"""Gene-mention tagging with span-level F1, computed in an own evaluate()."""
import json
import os

import torch
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForTokenClassification, Trainer, TrainingArguments, set_seed

LENGTH = 20


class Mentions(Dataset):
    """Tag 1 opens a mention, tag 2 continues it."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(22, 150, (n, LENGTH), generator=g)
        self.tags = torch.zeros(n, LENGTH, dtype=torch.long)
        for i in range(n):
            for start in (2, 9, 15):
                if torch.rand(1, generator=g) < 0.6:
                    size = int(torch.randint(1, 4, (1,), generator=g))
                    self.ids[i, start] = torch.randint(5, 30, (1,), generator=g)
                    self.ids[i, start + 1 : start + size] = torch.randint(30, 60, (size - 1,), generator=g)
                    self.tags[i, start] = 1
                    self.tags[i, start + 1 : start + size] = 2

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.tags[i]}


def spans(tags):
    found, start = set(), None
    for k, t in enumerate(list(tags) + [0]):
        if start is not None and t != 2:
            found.add((start, k))
            start = None
        if t == 1:
            start = k
    return found


class SpanTrainer(Trainer):
    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        self.model.eval()
        hit = n_pred = n_gold = 0
        for batch in self.get_eval_dataloader(eval_dataset):
            batch = self._prepare_inputs(batch)
            guess = self.model(input_ids=batch["input_ids"]).logits.argmax(-1)
            for p, t in zip(guess.tolist(), batch["labels"].tolist()):
                p, t = spans(p), spans(t)
                hit += len(p & t)
                n_pred += len(p)
                n_gold += len(t)
        precision, recall = hit / max(n_pred, 1), hit / max(n_gold, 1)
        f1 = 2 * precision * recall / max(precision + recall, 1e-9)
        metrics = {
            f"{metric_key_prefix}_precision": precision,
            f"{metric_key_prefix}_recall": recall,
            f"{metric_key_prefix}_f1": f1,
            f"{metric_key_prefix}_gold_spans": n_gold,
        }
        self.log(metrics)
        self.model.train()
        return metrics


def main():
    set_seed(3)
    model = DistilBertForTokenClassification(
        DistilBertConfig(vocab_size=150, dim=48, n_layers=2, n_heads=4, hidden_dim=96, max_position_embeddings=32, num_labels=3)
    )
    args = TrainingArguments(
        output_dir="ner", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=16, learning_rate=2e-3, logging_steps=10, eval_strategy="epoch",
        average_tokens_across_devices=False, save_strategy="no", report_to="none", disable_tqdm=True,
    )
    trainer = SpanTrainer(model=model, args=args, train_dataset=Mentions(384, 0), eval_dataset=Mentions(150, 1))
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        with open(os.path.join(args.output_dir, "f1.json"), "w") as f:
            json.dump(metrics, f, indent=2)
    trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
