"""Rare classes are drawn more often, with replacement. All processes draw the same list of indices from a shared
generator; accelerate deals the batches out."""
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainingArguments, set_seed

CLASSES, DIM = 4, 12
SHARE = torch.tensor([0.8, 0.12, 0.05, 0.03])


class Rare(Dataset):
    def __init__(self, n, seed, share=SHARE):
        centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(99))
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.multinomial(share, n, replacement=True, generator=g)
        self.x = centres[self.labels] + 1.2 * torch.randn(n, DIM, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.labels[i]}


class BalancedDraws(Sampler):
    def __init__(self, labels, num_draws, seed):
        counts = torch.bincount(labels, minlength=CLASSES)
        self.weights = 1.0 / counts[labels].double()
        self.num_draws, self.seed, self.epoch = num_draws, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_draws

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from torch.multinomial(self.weights, self.num_draws, replacement=True, generator=g).tolist()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class BalancedTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        data = train_dataset if train_dataset is not None else self.train_dataset
        return BalancedDraws(data.labels, num_draws=480, seed=self.args.seed)


def macro_recall(pred):
    guess = pred.predictions.argmax(-1)
    recalls = [(guess[pred.label_ids == c] == c).mean() for c in range(CLASSES)]
    return {"macro_recall": float(sum(recalls) / CLASSES)}


def main():
    set_seed(6)
    args = TrainingArguments(
        output_dir="runs/rare", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=50, learning_rate=4e-3, eval_strategy="epoch", logging_steps=10,
        save_strategy="no", report_to="none", dataloader_pin_memory=False, seed=6,
    )
    trainer = BalancedTrainer(
        model=Classifier(), args=args, train_dataset=Rare(900, 1),
        eval_dataset=Rare(400, 2, share=torch.full((CLASSES,), 0.25)), compute_metrics=macro_recall,
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("macro recall", round(scores["eval_macro_recall"], 3))


if __name__ == "__main__":
    main()
