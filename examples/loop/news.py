"""Topics of news: a small BERT that is trained from scratch on texts in a CSV file.

python news.py FOLDER
lockstep run --nproc 2 news.py FOLDER
"""

import csv
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import lockstep

TOPICS = ["World", "Sports", "Business", "Sci/Tech"]
EPOCHS, BATCH, LENGTH, VOCABULARY = 2, 32, 40, 4000


def words(text):
    return re.findall(r"[a-z]+|[0-9]+", text.lower())[:LENGTH]


def read(path, ids=None):
    with open(path, encoding="utf-8") as file:
        rows = [(words(row["text"]), TOPICS.index(row["label"])) for row in csv.DictReader(file)]
    if ids is None:
        common = Counter(word for text, _ in rows for word in text).most_common(VOCABULARY)
        ids = {word: number for number, (word, _) in enumerate(common, start=2)}  # 0 is padding, 1 an unknown word
    return [(torch.tensor([ids.get(word, 1) for word in text]), label) for text, label in rows], ids


def pad(samples):
    texts, labels = zip(*samples, strict=True)
    tokens = pad_sequence(texts, batch_first=True)
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "labels": torch.tensor(labels)}


torch.manual_seed(0)
folder = Path(sys.argv[1])
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
train_data, ids = read(folder / "train.csv")
test_data, _ = read(folder / "test.csv", ids)
config = BertConfig(
    vocab_size=len(ids) + 2, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=LENGTH, num_labels=4,
)  # fmt: skip
model = BertForSequenceClassification(config).to(device)
loader = DataLoader(train_data, batch_size=BATCH, shuffle=True, collate_fn=pad)
test_loader = DataLoader(test_data, batch_size=128, collate_fn=pad)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
scheduler = get_linear_schedule_with_warmup(optimizer, 20, EPOCHS * len(loader))

loop = lockstep.Loop(model, optimizer, loader, epochs=EPOCHS, clip_norm=1.0)
for epoch, steps in loop.epochs():
    model.train()
    for step in steps:
        for batch in step:
            batch = {name: value.to(device) for name, value in batch.items()}
            logits = model(batch["input_ids"], batch["attention_mask"]).logits
            loss = cross_entropy(logits, batch["labels"])
            step.backward(loss)
        scheduler.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in test_loader:
            batch = {name: value.to(device) for name, value in batch.items()}
            logits = model(batch["input_ids"], batch["attention_mask"]).logits
            right += (logits.argmax(1) == batch["labels"]).sum().item()
    print(f"epoch {epoch + 1}: accuracy {right / len(test_data):.3f}")
loop.save("model.pt")
