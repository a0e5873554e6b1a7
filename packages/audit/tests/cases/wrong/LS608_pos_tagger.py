# BiLSTM sequence tagger on a toy grammar; token accuracy on a held-out set.
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "B-ORG"]
VOCAB = 200


def make_corpus(n, seed):
    rng = random.Random(seed)
    corpus = []
    for _ in range(n):
        length = rng.randint(4, 40)
        words = [rng.randrange(1, VOCAB) for _ in range(length)]
        tags = [0 if w > 120 else 1 + w % 4 for w in words]
        tags = [t if rng.random() > 0.1 else rng.randrange(len(TAGS)) for t in tags]
        corpus.append((torch.tensor(words), torch.tensor(tags)))
    return corpus


def collate(batch):
    words, tags = zip(*batch)
    return {
        "input_ids": pad_sequence(words, batch_first=True, padding_value=0),
        "labels": pad_sequence(tags, batch_first=True, padding_value=-100),
    }


class Tagger(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.proj = nn.Linear(2 * dim, len(TAGS))

    def forward(self, input_ids):
        h, _ = self.lstm(self.emb(input_ids))
        return self.proj(h)


accelerator = Accelerator(cpu=True)
set_seed(0)

train_dl = DataLoader(make_corpus(480, 1), batch_size=8, shuffle=True, collate_fn=collate, drop_last=True)
eval_dl = DataLoader(make_corpus(160, 2), batch_size=8, collate_fn=collate)

model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
model, optimizer, train_dl, eval_dl = accelerator.prepare(model, optimizer, train_dl, eval_dl)

for epoch in range(3):
    model.train()
    for batch in train_dl:
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=-100)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    correct, total = 0, 0
    for batch in eval_dl:
        with torch.no_grad():
            predictions = model(batch["input_ids"]).argmax(dim=-1)
        labels = batch["labels"]
        # batches are padded to their own longest sentence
        predictions = accelerator.pad_across_processes(predictions, dim=1)
        labels = accelerator.pad_across_processes(labels, dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        mask = labels != -100
        correct += (predictions[mask] == labels[mask]).sum().item()
        total += mask.sum().item()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}  token accuracy {correct / total:.4f}  ({total} tokens)")
accelerator.end_training()
