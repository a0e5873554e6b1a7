"""Spam filter with adversarial training: two backward passes per step, on disturbed embeddings in the second."""
import torch
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

VOCAB, LENGTH = 200, 15


class Mails(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.spam = torch.randint(0, 2, (n,), generator=g)
        self.words = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
        bait = torch.randint(0, 12, (n, LENGTH), generator=g)
        use = (torch.rand(n, LENGTH, generator=g) < 0.25) & (self.spam[:, None] == 1)
        self.words = torch.where(use, bait, self.words)

    def __len__(self):
        return len(self.spam)

    def __getitem__(self, i):
        return {"words": self.words[i], "labels": self.spam[i]}


class SpamNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, words, labels=None):
        logits = self.net(self.embed(words).mean(dim=1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class AdversarialTrainer(Trainer):
    """Fast gradient method on the embedding table.

    After the first backward pass the gradient is already averaged over the ranks, so all of them
    disturb the table in the same way. The second backward pass adds its (averaged) gradient.
    """

    epsilon = 0.5

    def training_step(self, model, inputs, num_items_in_batch=None):
        clean_loss = super().training_step(model, inputs, num_items_in_batch)
        table = self.model.embed.weight
        backup = table.detach().clone()
        with torch.no_grad():
            norm = table.grad.norm()
            if norm > 0:
                table.add_(table.grad / norm, alpha=self.epsilon)
        super().training_step(model, inputs, num_items_in_batch)
        with torch.no_grad():
            table.copy_(backup)
        return clean_loss


def scores(pred):
    guess = pred.predictions.argmax(-1)
    spam = pred.label_ids == 1
    return {
        "accuracy": float((guess == pred.label_ids).mean()),
        "recall": float((guess[spam] == 1).mean()),
    }


def main():
    set_seed(14)
    args = TrainingArguments(
        output_dir="out_spam", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=5e-3, eval_strategy="epoch", save_strategy="no",
        logging_steps=10, report_to="none", disable_tqdm=True, seed=14,
    )
    trainer = AdversarialTrainer(
        model=SpamNet(), args=args, train_dataset=Mails(640, 0), eval_dataset=Mails(192, 1),
        compute_metrics=scores,
    )
    trainer.train()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
