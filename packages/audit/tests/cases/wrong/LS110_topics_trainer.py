"""Topic classifier with Trainer; the texts and their topic names come as plain strings."""
import random

import torch
from transformers import RobertaConfig, RobertaForSequenceClassification, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)

TOPIC_WORDS = {
    "sports": ["goal", "match", "coach", "league"],
    "finance": ["stock", "bank", "yield", "loan"],
    "travel": ["hotel", "flight", "beach", "visa"],
    "science": ["atom", "cell", "orbit", "enzyme"],
    "cooking": ["oven", "butter", "salt", "knife"],
    "music": ["chord", "tempo", "violin", "choir"],
}
FILLER = ["the", "a", "is", "was", "of", "and", "to", "in"]


def make_rows(n, seed):
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        topic = rng.choice(list(TOPIC_WORDS))
        words = rng.choices(FILLER, k=6) + rng.choices(TOPIC_WORDS[topic], k=4)
        rng.shuffle(words)
        rows.append((" ".join(words), topic))
    return rows


class TopicDataset(torch.utils.data.Dataset):
    def __init__(self, rows, vocab, label2id):
        self.rows, self.vocab, self.label2id = rows, vocab, label2id

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        text, topic = self.rows[i]
        return {"input_ids": torch.tensor([self.vocab[w] for w in text.split()]), "labels": self.label2id[topic]}


def compute_metrics(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def main():
    set_seed(19)
    train_rows, eval_rows = make_rows(320, 0), make_rows(64, 1)
    words = {w for text, _ in train_rows + eval_rows for w in text.split()}
    vocab = {w: i + 4 for i, w in enumerate(sorted(words))}
    topics = list(set(topic for _, topic in train_rows))
    label2id = {t: i for i, t in enumerate(topics)}

    config = RobertaConfig(vocab_size=len(vocab) + 4, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
                           intermediate_size=64, max_position_embeddings=32, num_labels=len(topics), pad_token_id=1,
                           label2id=label2id, id2label={i: t for t, i in label2id.items()})
    model = RobertaForSequenceClassification(config)
    args = TrainingArguments(
        output_dir="topics", use_cpu=True, num_train_epochs=2, per_device_train_batch_size=8, learning_rate=8e-3,
        per_device_eval_batch_size=16, eval_strategy="epoch", save_strategy="no", logging_steps=10,
        average_tokens_across_devices=False, report_to="none", disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=TopicDataset(train_rows, vocab, label2id),
                      eval_dataset=TopicDataset(eval_rows, vocab, label2id), compute_metrics=compute_metrics)
    trainer.train()
    if trainer.is_world_process_zero():
        print([round(h["eval_accuracy"], 4) for h in trainer.state.log_history if "eval_accuracy" in h])
    trainer.save_model("topics/final")


if __name__ == "__main__":
    main()
