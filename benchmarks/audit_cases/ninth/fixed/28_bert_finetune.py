"""Fine-tune a small BERT for sentence pairs: first the classifier alone, then the whole encoder."""
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from accelerate import Accelerator
from accelerate.utils import set_seed

HEAD_EPOCHS, EPOCHS = 1, 3
SEP = 1


class Pairs(Dataset):
    """The label says whether the second sentence speaks about the same topic as the first."""

    def __init__(self, n, seed):
        gen = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            a = torch.randint(0, 8, (1,), generator=gen).item()
            same = torch.randint(0, 2, (1,), generator=gen).item()
            b = a if same else (a + 1 + torch.randint(0, 7, (1,), generator=gen).item()) % 8
            first = 2 + a * 12 + torch.randint(0, 12, (7,), generator=gen)
            second = 2 + b * 12 + torch.randint(0, 12, (7,), generator=gen)
            ids = torch.cat([first, torch.tensor([SEP]), second, torch.tensor([SEP])])
            types = torch.tensor([0] * 8 + [1] * 8)
            self.rows.append({"input_ids": ids, "token_type_ids": types, "labels": torch.tensor(same)})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad = flag


@torch.no_grad()
def accuracy(accelerator, model, loader):
    model.eval()
    hits = []
    for batch in loader:
        hit = model(**batch).logits.argmax(-1) == batch["labels"]
        hits.append(accelerator.gather_for_metrics(hit))
    model.train()
    return torch.cat(hits).float().mean().item()


def main():
    set_seed(8)
    accelerator = Accelerator(cpu=True)
    config = BertConfig(
        vocab_size=100, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )
    model = BertForSequenceClassification(config)
    set_trainable(model.bert, False)

    train_loader = DataLoader(Pairs(800, seed=1), batch_size=20, shuffle=True)
    val_loader = DataLoader(Pairs(200, seed=2), batch_size=20)
    optimizer = torch.optim.AdamW(
        [
            {"params": model.bert.parameters(), "lr": 1e-3},
            {"params": model.classifier.parameters(), "lr": 5e-3},
        ]
    )
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )

    for epoch in range(EPOCHS):
        if epoch == HEAD_EPOCHS:
            model = accelerator.unwrap_model(model)
            set_trainable(model.bert, True)
            model = accelerator.prepare(model)
            accelerator.print("encoder released")
        model.train()
        total = 0.0
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), reduction="mean").item()
        acc = accuracy(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: loss {total / len(train_loader):.4f}, val accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
