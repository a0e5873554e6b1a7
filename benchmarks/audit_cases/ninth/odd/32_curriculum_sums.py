"""Counting objects in noisy strips, trained from easy to hard with an own sampler."""
import torch
import torch.nn as nn
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainingArguments, set_seed

LENGTH, CLASSES = 24, 5


class Strips(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.count = torch.randint(0, CLASSES, (n,), generator=g)
        self.noise = torch.rand(n, generator=g)
        self.strip = torch.randn(n, LENGTH, generator=g) * self.noise[:, None]
        for row, count in zip(self.strip, self.count.tolist()):
            row[torch.randperm(LENGTH, generator=g)[:count]] += 3.0

    def __len__(self):
        return len(self.count)

    def __getitem__(self, i):
        return {"strip": self.strip[i], "labels": self.count[i]}


class EasyToHard(Sampler):
    """The global order of an epoch: only the easier part at first, all samples in the last epoch.

    The order depends on the seed and the number of the pass only, so all ranks make the same list;
    the Trainer's loader gives every rank its own batches of it.
    """

    def __init__(self, difficulty, shares, per_epoch, seed):
        self.order = torch.argsort(difficulty)
        self.shares = shares
        self.per_epoch = per_epoch
        self.seed = seed
        self.passes = 0

    def __len__(self):
        return self.per_epoch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.passes)
        share = self.shares[min(self.passes, len(self.shares) - 1)]
        self.passes += 1
        pool = self.order[: int(share * len(self.order))]
        picks = [pool[torch.randperm(len(pool), generator=g)]]
        while sum(len(p) for p in picks) < self.per_epoch:
            picks.append(pool[torch.randperm(len(pool), generator=g)])
        yield from torch.cat(picks)[: self.per_epoch].tolist()


class CurriculumTrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return EasyToHard(dataset.noise, shares=[0.25, 0.5, 1.0], per_epoch=len(dataset), seed=self.args.seed)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LENGTH, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, CLASSES))

    def forward(self, strip, labels=None):
        logits = self.net(strip)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def accuracy(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def main():
    set_seed(12)
    args = TrainingArguments(
        output_dir="out_strips", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=3e-3, eval_strategy="epoch", save_strategy="no",
        logging_steps=10, report_to="none", disable_tqdm=True, seed=12,
    )
    trainer = CurriculumTrainer(
        model=Counter(), args=args, train_dataset=Strips(768, 0), eval_dataset=Strips(192, 1),
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
