"""Intent classification for a banking assistant with a BERT encoder and the datasets library."""
import numpy as np
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)

INTENTS = {
    "balance": ["how much money do i have", "show my balance please", "what is left on my account"],
    "transfer": ["send money to my friend", "transfer the rent now", "pay my landlord please"],
    "card": ["my card is lost", "block the card now", "i need a new card"],
    "loan": ["can i have a loan", "what is the rate of a loan", "i need money for a house"],
}
NAMES = list(INTENTS)
FILLER = "hello hi please today now thanks quickly maybe sorry again still really".split()


def build_corpus(n=600, seed=0):
    rng = np.random.default_rng(seed)
    texts, labels = [], []
    for _ in range(n):
        label = int(rng.integers(len(NAMES)))
        words = str(rng.choice(INTENTS[NAMES[label]])).split()
        for _ in range(int(rng.integers(1, 5))):
            words.insert(int(rng.integers(len(words) + 1)), str(rng.choice(FILLER)))
        if rng.random() < 0.15:
            label = int(rng.integers(len(NAMES)))
        texts.append(" ".join(words))
        labels.append(label)
    return Dataset.from_dict({"text": texts, "label": labels})


def build_vocab(corpus):
    words = sorted({w for text in corpus["text"] for w in text.split()})
    return {w: i + 1 for i, w in enumerate(words)}


def encode(batch, vocab, width=14):
    ids, masks = [], []
    for text in batch["text"]:
        row = [vocab[w] for w in text.split()][:width]
        masks.append([1] * len(row) + [0] * (width - len(row)))
        ids.append(row + [0] * (width - len(row)))
    return {"input_ids": ids, "attention_mask": masks}


def accuracy(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def main():
    corpus = build_corpus()
    vocab = build_vocab(corpus)
    corpus = corpus.map(encode, batched=True, fn_kwargs={"vocab": vocab}, remove_columns=["text"])
    splits = corpus.train_test_split(test_size=0.2, seed=42)

    args = TrainingArguments(
        output_dir="out_intent",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=2e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=10,
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
        seed=42,
    )
    config = BertConfig(
        vocab_size=len(vocab) + 1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=16, num_labels=len(NAMES),
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
