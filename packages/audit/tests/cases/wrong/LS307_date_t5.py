"""Normalising written dates ("3 march 1998" -> "1998-03-03") with a small T5, trained from scratch."""
import random

import torch
from torch.utils.data import Dataset
from transformers import (
    Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration,
    get_cosine_schedule_with_warmup, set_seed,
)

MONTHS = "january february march april may june july august september october november december".split()
CHARS = "_$ abcdefghijklmnopqrstuvwxyz0123456789-"
EPOCHS, BATCH = 3, 16


def encode(text):
    return [CHARS.index(c) for c in text] + [1]


class Dates(Dataset):
    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.pairs = []
        for _ in range(n):
            d, m, y = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1950, 2020)
            self.pairs.append((f"{d} {MONTHS[m - 1]} {y}", f"{y}-{m:02d}-{d:02d}"))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        src, tgt = self.pairs[i]
        return {"input_ids": encode(src), "labels": encode(tgt)}


def collate(batch):
    def pad(seqs, value):
        width = max(map(len, seqs))
        return torch.tensor([s + [value] * (width - len(s)) for s in seqs])

    ids = pad([b["input_ids"] for b in batch], 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": pad([b["labels"] for b in batch], -100)}


def exact_match(pred):
    hits = 0
    for guess, gold in zip(pred.predictions, pred.label_ids):
        guess = [t for t in guess.tolist() if t > 1]
        hits += guess == [t for t in gold.tolist() if t > 1]
    return {"exact_match": hits / len(pred.label_ids)}


def main():
    set_seed(3)
    train_set, dev_set = Dates(800, seed=1), Dates(64, seed=2)
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=len(CHARS), d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    ))
    args = Seq2SeqTrainingArguments(
        output_dir="dates-t5", use_cpu=True, num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=32, predict_with_generate=True, generation_max_length=14,
        eval_strategy="epoch", logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True,
        average_tokens_across_devices=False, seed=3,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    total_steps = EPOCHS * (len(train_set) // BATCH)
    scheduler = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=int(0.2 * total_steps), num_training_steps=total_steps,
    )
    trainer = Seq2SeqTrainer(
        model=model, args=args, train_dataset=train_set, eval_dataset=dev_set, data_collator=collate,
        compute_metrics=exact_match, optimizers=(optimizer, scheduler),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "learning_rate" in entry:
                print(f"step {entry['step']:3d}  lr {entry['learning_rate']:.5f}  loss {entry['loss']:.3f}")


if __name__ == "__main__":
    main()
