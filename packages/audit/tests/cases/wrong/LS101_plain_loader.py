"""Finetune a tiny BERT with a Trainer that has its own loader (class-balanced batches)."""
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Toy(Dataset):
    def __init__(self, n=320):
        g = torch.Generator().manual_seed(2)
        self.ids = torch.randint(5, 60, (n, 10), generator=g)
        self.labels = (self.ids[:, 0] > 45).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


class BalancedTrainer(Trainer):
    def get_train_dataloader(self):
        labels = self.train_dataset.labels
        weights = (1.0 / torch.bincount(labels).float())[labels]
        gen = torch.Generator().manual_seed(self.args.seed)
        sampler = WeightedRandomSampler(weights, len(labels) // self.args.world_size, generator=gen)
        return DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
        )


def main():
    set_seed(4)
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    args = TrainingArguments(
        output_dir="bert-out",
        use_cpu=True,
        per_device_train_batch_size=16,
        num_train_epochs=2,
        learning_rate=1e-3,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = BalancedTrainer(model=BertForSequenceClassification(config), args=args, train_dataset=Toy())
    trainer.train()


if __name__ == "__main__":
    main()
