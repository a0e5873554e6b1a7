"""Language model on an endless stream of text shards. Each rank reads its own part of the stream."""
import itertools
import os

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

VOCAB, LENGTH = 30, 16


class Stream(IterableDataset):
    """All ranks draw the same permutation per pass; rank r takes every world-th document of it."""

    def __init__(self, documents, seed, rank, world):
        self.documents, self.seed, self.rank, self.world = documents, seed, rank, world

    def __iter__(self):
        for turn in itertools.count():
            g = torch.Generator().manual_seed(self.seed + turn)
            order = torch.randperm(len(self.documents), generator=g)
            for i in order[self.rank :: self.world].tolist():
                yield {"input_ids": self.documents[i], "labels": self.documents[i]}


class StreamTrainer(Trainer):
    def get_train_dataloader(self):
        stream = Stream(self.train_dataset, self.args.seed, self.args.process_index, self.args.world_size)
        return DataLoader(stream, batch_size=self.args.train_batch_size, collate_fn=self.data_collator)


def corpus(size):
    g = torch.Generator().manual_seed(0)
    start = torch.randint(0, VOCAB, (size, 1), generator=g)
    step = torch.randint(1, 4, (size, 1), generator=g)
    return (start + step * torch.arange(LENGTH)) % VOCAB


def main():
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )
    args = TrainingArguments(
        output_dir="stream",
        use_cpu=True,
        max_steps=60,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=5,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = StreamTrainer(model=model, args=args, train_dataset=corpus(480))
    trainer.train()
    if trainer.is_world_process_zero():
        os.makedirs("stream", exist_ok=True)
        torch.save(trainer.model.state_dict(), "stream/model.pt")
        print([round(r["loss"], 3) for r in trainer.state.log_history if "loss" in r])


if __name__ == "__main__":
    main()
