"""Intent detection for short commands; texts and intent names come from a table of templates."""
import random

import numpy as np
from datasets import Dataset
from transformers import (
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from tokenizers import Tokenizer, models, pre_tokenizers

TEMPLATES = {
    "play_music": ["play {x}", "put on {x} please", "start the song {x}"],
    "set_alarm": ["wake me at {x}", "alarm for {x}", "set a timer to {x}"],
    "weather": ["will it rain in {x}", "forecast for {x}", "is it cold in {x} today"],
    "book_table": ["a table at {x}", "reserve seats at {x} please", "book dinner in {x}"],
    "navigate": ["drive to {x}", "route to {x} please", "how far is {x} from here"],
    "send_message": ["text {x} that i am late", "write to {x}", "tell {x} hello"],
    "lights": ["turn the lamp in {x} on", "lights off in {x}", "dim the {x} lamp"],
}
FILLERS = ["paris", "anna", "seven", "jazz", "the kitchen", "tomorrow", "luigi", "berlin", "bob", "noon"]


def make_rows(n, seed):
    rng = random.Random(seed)
    names = sorted(TEMPLATES)
    rows = []
    for _ in range(n):
        intent = rng.choice(names)
        rows.append({"text": rng.choice(TEMPLATES[intent]).format(x=rng.choice(FILLERS)), "intent": intent})
    return rows


def word_tokenizer(texts):
    words = sorted({w for t in texts for w in t.split()})
    vocab = {"[PAD]": 0, "[UNK]": 1, **{w: i + 2 for i, w in enumerate(words)}}
    tok = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="[PAD]", unk_token="[UNK]")


def accuracy(pred):
    return {"accuracy": float(np.mean(pred.predictions.argmax(-1) == pred.label_ids))}


def main():
    set_seed(3)
    rows = make_rows(800, seed=1)
    intents = sorted(set(r["intent"] for r in rows))
    label2id = {name: i for i, name in enumerate(intents)}
    tokenizer = word_tokenizer([r["text"] for r in rows])

    def encode(rows):
        enc = tokenizer([r["text"] for r in rows])
        return Dataset.from_dict(
            {
                "input_ids": enc["input_ids"],
                "attention_mask": enc["attention_mask"],
                "labels": [label2id[r["intent"]] for r in rows],
            }
        )

    model = DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=len(tokenizer), dim=32, hidden_dim=64, n_layers=1, n_heads=2, max_position_embeddings=32,
            id2label={i: name for name, i in label2id.items()}, label2id=label2id,
        )
    )
    args = TrainingArguments(
        output_dir="runs/intents",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=40,
        learning_rate=3e-3,
        eval_strategy="epoch",
        average_tokens_across_devices=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        seed=3,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=encode(rows[:640]),
        eval_dataset=encode(rows[640:]),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("held-out accuracy", round(scores["eval_accuracy"], 3))


if __name__ == "__main__":
    main()
