"""Fine-tune a small DistilBERT on (synthetic) review snippets."""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification, get_scheduler

torch.set_num_threads(1)


class Reviews(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 2, (n,), generator=g)
        self.ids = torch.randint(10, 60, (n, 14), generator=g)
        for i in range(n):
            k = int(torch.randint(1, 4, (1,), generator=g))
            self.ids[i, 1:1 + k] = 60 + self.label[i] * 15
        self.ids[:, 0] = 1

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.label[i]}


def evaluate(accelerator, model, loader):
    model.eval()
    all_preds, all_labels = [], []
    for batch in loader:
        with torch.no_grad():
            logits = model(**batch).logits
        preds = logits.argmax(dim=-1)
        preds, labels = accelerator.gather_for_metrics((preds, batch["labels"]))
        all_preds.append(preds.cpu())
        all_labels.append(labels.cpu())
    preds, labels = torch.cat(all_preds), torch.cat(all_labels)
    tp = ((preds == 1) & (labels == 1)).sum().item()
    fp = ((preds == 1) & (labels == 0)).sum().item()
    fn = ((preds == 0) & (labels == 1)).sum().item()
    return {"accuracy": (preds == labels).float().mean().item(), "f1": 2 * tp / max(2 * tp + fp + fn, 1)}


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(13)
    config = DistilBertConfig(vocab_size=100, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32)
    model = DistilBertForSequenceClassification(config)
    train_loader = DataLoader(Reviews(192, 0), batch_size=12, shuffle=True)
    eval_loader = DataLoader(Reviews(49, 1), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    epochs = 2
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=epochs * len(train_loader))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    for epoch in range(epochs):
        model.train()
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        metrics = evaluate(accelerator, model, eval_loader)
        accelerator.print(f"epoch {epoch}: " + " ".join(f"{k}={v:.5f}" for k, v in metrics.items()))


if __name__ == "__main__":
    main()
