"""Metrics are counted batch by batch (batch_eval_metrics). The Trainer hands over batches that are already gathered
from all processes, so each process holds the counts of the whole evaluation set."""
import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback, ElectraConfig, ElectraForTokenClassification, Trainer, TrainingArguments, set_seed,
)

VOCAB, SEQ, TAGS = 80, 18, 3


class Spans(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, VOCAB, (n, SEQ), generator=g)
        self.tags = (self.ids < 22).long()
        self.tags[(self.ids >= 22) & (self.ids < 34)] = 2

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.tags[i]}


class RunningF1:
    def __init__(self):
        self.clear()

    def clear(self):
        self.tp = torch.zeros(TAGS)
        self.guessed = torch.zeros(TAGS)
        self.gold = torch.zeros(TAGS)

    def __call__(self, pred, compute_result):
        guess, gold = pred.predictions, pred.label_ids
        for t in range(TAGS):
            self.tp[t] += ((guess == t) & (gold == t)).sum()
            self.guessed[t] += (guess == t).sum()
            self.gold[t] += (gold == t).sum()
        if not compute_result:
            return {}
        f1 = 2 * self.tp / (self.guessed + self.gold).clamp(min=1)
        seen = int(self.gold.sum())
        self.clear()
        return {"macro_f1": f1.mean().item(), "tokens": seen}


def main():
    set_seed(18)
    model = ElectraForTokenClassification(
        ElectraConfig(
            vocab_size=VOCAB, embedding_size=24, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=SEQ, num_labels=TAGS,
        )
    )
    args = TrainingArguments(
        output_dir="runs/spans", use_cpu=True, num_train_epochs=4, per_device_train_batch_size=16,
        per_device_eval_batch_size=16, learning_rate=3e-3, eval_strategy="epoch", save_strategy="epoch",
        save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="macro_f1", batch_eval_metrics=True,
        average_tokens_across_devices=False, logging_steps=8, report_to="none", dataloader_pin_memory=False, seed=18,
    )
    trainer = Trainer(
        model=model, args=args, train_dataset=Spans(384, 1), eval_dataset=Spans(192, 2), compute_metrics=RunningF1(),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"macro F1 {scores['eval_macro_f1']:.3f} on {scores['eval_tokens']} tokens")


if __name__ == "__main__":
    main()
