"""Language identification of words; batches of equal length from an own rank-aware batch sampler."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer, TrainingArguments, set_seed

LETTERS, LANGUAGES = 26, 3


class Words(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        table = torch.rand(LANGUAGES, LETTERS, generator=torch.Generator().manual_seed(50)) ** 3
        self.language = torch.randint(0, LANGUAGES, (n,), generator=g)
        self.length = torch.randint(3, 13, (n,), generator=g)
        self.words = [
            torch.multinomial(table[lang], size, replacement=True, generator=g) + 1
            for lang, size in zip(self.language.tolist(), self.length.tolist())
        ]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return {"letters": self.words[i], "labels": self.language[i]}


def pad(rows):
    letters = nn.utils.rnn.pad_sequence([r["letters"] for r in rows], batch_first=True)
    return {"letters": letters, "labels": torch.stack([r["labels"] for r in rows])}


class LengthBatches(Sampler):
    """Shuffles, sorts chunks by length, cuts global batches and yields this rank's half of each."""

    def __init__(self, lengths, batch_size, rank, world_size, seed, chunk=8):
        self.lengths, self.batch_size = lengths, batch_size
        self.rank, self.world_size = rank, world_size
        self.seed, self.chunk, self.passes = seed, chunk, 0

    def __len__(self):
        return len(self.lengths) // (self.batch_size * self.world_size)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.passes)
        self.passes += 1
        whole = self.batch_size * self.world_size
        order = torch.randperm(len(self.lengths), generator=g)[: len(self) * whole]
        parts = [part[torch.argsort(self.lengths[part])] for part in order.split(whole * self.chunk)]
        batches = torch.cat(parts).view(-1, whole)
        for b in torch.randperm(len(batches), generator=g).tolist():
            yield batches[b][self.rank :: self.world_size].tolist()


class LengthTrainer(Trainer):
    def get_train_dataloader(self):
        batches = LengthBatches(
            self.train_dataset.length, self.args.per_device_train_batch_size,
            self.args.process_index, self.args.world_size, self.args.seed,
        )
        # not prepared by Accelerate on purpose: the batches are already those of this rank
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=pad)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(LETTERS + 1, 48, mode="mean", padding_idx=0)
        self.head = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, LANGUAGES))

    def forward(self, letters, labels=None):
        logits = self.head(self.embed(letters))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def accuracy(pred):
    return {"accuracy": float((pred.predictions.argmax(-1) == pred.label_ids).mean())}


def main():
    set_seed(8)
    args = TrainingArguments(
        output_dir="out_words", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=5e-3, eval_strategy="epoch", save_strategy="no",
        logging_steps=10, report_to="none", disable_tqdm=True, seed=8,
    )
    trainer = LengthTrainer(
        model=Tagger(), args=args, train_dataset=Words(1024, 0), eval_dataset=Words(256, 1),
        data_collator=pad, compute_metrics=accuracy,
    )
    trainer.train()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
