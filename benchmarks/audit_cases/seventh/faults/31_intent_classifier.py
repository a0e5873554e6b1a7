"""Bag-of-words intent classifier for a support chatbot."""
import json
import random
from collections import Counter
from pathlib import Path

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset

DATA = Path("utterances.jsonl")
INTENTS = {
    "refund": "money back return charge refund paid",
    "shipping": "parcel track delivery late courier box",
    "login": "password account locked sign email reset",
    "cancel": "stop subscription cancel plan end leave",
    "upgrade": "premium upgrade more seats plan better",
    "bug": "crash error broken freeze screen app",
    "hours": "open close weekend hours today store",
    "human": "agent person talk human call speak",
}


def write_data(path, n=960):
    rng = random.Random(31)
    filler = "i you the my please want to is a it now how can".split()
    with open(path, "w") as f:
        for _ in range(n):
            intent = rng.choice(list(INTENTS))
            words = rng.sample(INTENTS[intent].split(), 3) + rng.choices(filler, k=5)
            rng.shuffle(words)
            f.write(json.dumps({"text": " ".join(words), "intent": intent}) + "\n")


class Utterances(Dataset):
    def __init__(self, rows, vocab, label2id):
        self.items = [
            (torch.tensor([vocab[w] for w in r["text"].split()]), label2id[r["intent"]]) for r in rows
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class IntentNet(nn.Module):
    def __init__(self, vocab_size, n_labels):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab_size, 32)
        self.fc = nn.Linear(32, n_labels)

    def forward(self, ids):
        return self.fc(torch.relu(self.bag(ids)))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            write_data(DATA)
        rows = [json.loads(line) for line in DATA.open()]

    counts = Counter(w for r in rows for w in r["text"].split())
    vocab = {w: i for i, (w, _) in enumerate(counts.most_common())}
    label_names = list({r["intent"] for r in rows})
    label2id = {name: i for i, name in enumerate(label_names)}

    train = DataLoader(Utterances(rows[:800], vocab, label2id), batch_size=16, shuffle=True)
    test = DataLoader(Utterances(rows[800:], vocab, label2id), batch_size=16)
    model = IntentNet(len(vocab), len(label_names))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(3):
        model.train()
        for ids, y in train:
            loss = criterion(model(ids), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        model.eval()
        hits = []
        with torch.no_grad():
            for ids, y in test:
                hits.append(accelerator.gather_for_metrics((model(ids).argmax(-1) == y).float()))
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}  test accuracy {torch.cat(hits).mean():.3f}")

    if accelerator.is_main_process:
        Path("labels.json").write_text(json.dumps(label_names))
    accelerator.end_training()


if __name__ == "__main__":
    main()
