"""Own training loader with a bucketed distributed sampler. It is already one shard per process, so it is not
handed to accelerate; the callback gives the sampler its epoch."""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Walks(Dataset):
    """Random walks of different length; predict whether the end lies above the start."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(6, 40, (n,), generator=g).tolist()
        self.steps = [torch.randn(k, 1, generator=g) for k in self.lengths]

    def __len__(self):
        return len(self.steps)

    def __getitem__(self, i):
        return {"steps": self.steps[i], "labels": int(self.steps[i].sum() > 0)}


def collate(items):
    return {
        "steps": pad_sequence([it["steps"] for it in items], batch_first=True),
        "length": torch.tensor([len(it["steps"]) for it in items]),
        "labels": torch.tensor([it["labels"] for it in items]),
    }


class BucketBatches(Sampler):
    """Batches of similar length. All processes build the same list and take every world-th batch of it."""

    def __init__(self, lengths, batch_size, rank, world, seed):
        self.lengths, self.batch_size = lengths, batch_size
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // (self.batch_size * self.world)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=g).tolist()
        pool = 8 * self.batch_size
        batches = []
        for start in range(0, len(order), pool):
            chunk = sorted(order[start : start + pool], key=lambda i: self.lengths[i])
            batches += [chunk[k : k + self.batch_size] for k in range(0, len(chunk), self.batch_size)]
        batches = [batches[i] for i in torch.randperm(len(batches), generator=g).tolist()]
        yield from batches[self.rank : len(self) * self.world : self.world]


class SumNet(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, steps, length, labels=None):
        packed = pack_padded_sequence(steps, length.cpu(), batch_first=True, enforce_sorted=False)
        _, h = self.rnn(packed)
        logits = self.head(h[-1])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class BucketTrainer(Trainer):
    def get_train_dataloader(self):
        batches = BucketBatches(
            self.train_dataset.lengths,
            self.args.per_device_train_batch_size,
            self.args.process_index,
            self.args.world_size,
            self.args.seed,
        )
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=collate)


class SetEpoch(TrainerCallback):
    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        train_dataloader.batch_sampler.set_epoch(round(state.epoch))


def main():
    set_seed(4)
    args = TrainingArguments(
        output_dir="runs/walks", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=5e-3, logging_steps=10, save_strategy="no",
        report_to="none", dataloader_pin_memory=False, remove_unused_columns=False, seed=4,
    )
    trainer = BucketTrainer(
        model=SumNet(), args=args, train_dataset=Walks(640, 1), eval_dataset=Walks(128, 2), data_collator=collate,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        callbacks=[SetEpoch()],
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("accuracy", round(scores["eval_accuracy"], 3))


if __name__ == "__main__":
    main()
