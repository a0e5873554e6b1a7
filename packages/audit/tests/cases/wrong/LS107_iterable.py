import os

import torch
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class LogLines(IterableDataset):
    def __init__(self, n):
        self.n = n
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))

    def __iter__(self):
        for i in range(self.rank, self.n, self.world):
            ids = torch.randint(5, 50, (8,), generator=torch.Generator().manual_seed(i))
            yield {"input_ids": ids, "labels": (ids[0] > ids[1]).long()}


def build():
    return BertForSequenceClassification(
        BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    )


def main():
    set_seed(1)
    args = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=8,
        max_steps=24,
        learning_rate=1e-3,
        logging_steps=8,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        accelerator_config={"dispatch_batches": False},
    )
    trainer = Trainer(model=build(), args=args, train_dataset=LogLines(384))
    trainer.train()


if __name__ == "__main__":
    main()
