"""Bag-of-words topic classifier; reports test accuracy and writes the predictions to a csv file."""
import csv

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCAB, TOPICS, LENGTH = 300, 5, 24


class Documents(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.topic = torch.randint(0, TOPICS, (n,), generator=g)
        common = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
        own = self.topic[:, None] * 40 + torch.randint(0, 60, (n, LENGTH), generator=g)
        pick = torch.rand(n, LENGTH, generator=g) < 0.35
        self.tokens = torch.where(pick, own, common)

    def __len__(self):
        return len(self.topic)

    def __getitem__(self, i):
        return {"tokens": self.tokens[i], "topic": self.topic[i]}


class BagClassifier(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.fc = nn.Linear(dim, TOPICS)

    def forward(self, tokens):
        return self.fc(self.bag(tokens))


def train_epoch(accelerator, model, optimizer, loader):
    model.train()
    for batch in loader:
        loss = F.cross_entropy(model(batch["tokens"]), batch["topic"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def predict(accelerator, model, loader):
    model.eval()
    preds, refs = [], []
    for batch in loader:
        logits = model(batch["tokens"])
        preds.append(accelerator.gather(logits.argmax(dim=-1)))
        refs.append(accelerator.gather(batch["topic"]))
    return torch.cat(preds), torch.cat(refs)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(21)

    train_loader = DataLoader(Documents(1000, seed=1), batch_size=25, shuffle=True)
    test_loader = DataLoader(Documents(101, seed=2), batch_size=16, shuffle=False)
    model = BagClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    for epoch in range(3):
        train_epoch(accelerator, model, optimizer, train_loader)
        preds, refs = predict(accelerator, model, test_loader)
        accuracy = (preds == refs).float().mean().item()
        accelerator.print(f"epoch {epoch}: test accuracy {accuracy:.4f} ({len(preds)} documents)")

    if accelerator.is_main_process:
        with open("predictions.csv", "w", newline="") as f:
            writer = csv.writer(f)
            writer.writerow(["document", "prediction", "topic"])
            for i, (p, r) in enumerate(zip(preds.tolist(), refs.tolist())):
                writer.writerow([i, p, r])
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
