"""Routing of support tickets to departments, read from a CSV export of the help desk."""
import csv
import os
import random

import torch
from transformers import (
    DataCollatorWithPadding, DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast,
    Trainer, TrainingArguments, set_seed,
)
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

DEPARTMENTS = {
    "billing": "invoice refund payment charge card receipt",
    "shipping": "parcel delivery courier address late tracking",
    "login": "password account reset email locked code",
    "hardware": "screen battery cable broken noise button",
    "returns": "return label exchange size wrong item",
    "legal": "contract privacy consent data terms copyright",
}
FILLER = "hello please help me with my the since yesterday it does not work i need thanks".split()


def write_export(path, n, seed):
    rng = random.Random(seed)
    with open(path, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["text", "department"])
        for _ in range(n):
            dep = rng.choice(list(DEPARTMENTS))
            words = rng.choices(FILLER, k=7) + rng.choices(DEPARTMENTS[dep].split(), k=3)
            rng.shuffle(words)
            writer.writerow([" ".join(words), dep])


def read_export(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(f))


def build_tokenizer():
    words = ["[PAD]", "[UNK]"] + sorted(set(FILLER) | set(" ".join(DEPARTMENTS.values()).split()))
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="[PAD]", unk_token="[UNK]")


def accuracy(pred):
    return {"accuracy": (pred.predictions.argmax(-1) == pred.label_ids).mean()}


def main():
    set_seed(5)
    args = TrainingArguments(
        output_dir="ticket-router", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=3e-3, eval_strategy="epoch", logging_steps=10,
        save_strategy="no", report_to=[], disable_tqdm=True, average_tokens_across_devices=False, seed=5,
    )
    with args.main_process_first(desc="export"):
        if args.process_index == 0:
            write_export("tickets_train.csv", 720, seed=1)
            write_export("tickets_dev.csv", 144, seed=2)
    rows, dev_rows = read_export("tickets_train.csv"), read_export("tickets_dev.csv")

    departments = list({row["department"] for row in rows})
    label2id = {name: i for i, name in enumerate(departments)}
    tokenizer = build_tokenizer()

    def encode(batch):
        enc = tokenizer(batch["text"], return_token_type_ids=False)
        enc["labels"] = [label2id[d] for d in batch["department"]]
        return enc

    train_set = Dataset.from_list(rows).map(encode, batched=True, remove_columns=["text", "department"])
    dev_set = Dataset.from_list(dev_rows).map(encode, batched=True, remove_columns=["text", "department"])

    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32,
        num_labels=len(departments), label2id=label2id, id2label={i: n for n, i in label2id.items()},
    )
    trainer = Trainer(
        model=DistilBertForSequenceClassification(config), args=args, train_dataset=train_set, eval_dataset=dev_set,
        data_collator=DataCollatorWithPadding(tokenizer), compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model(os.path.join(args.output_dir, "final"))


if __name__ == "__main__":
    main()
