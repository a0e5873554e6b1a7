"""Fine-tune a tiny BERT classifier; rare labels are drawn more often."""
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Intents(Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, 60, (n, 12), generator=g)
        self.labels = (self.ids[:, 0] > 40).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(12, dtype=torch.long), "labels": self.labels[i]}


class BalancedTrainer(Trainer):
    def get_train_dataloader(self):
        labels = self.train_dataset.labels
        weights = 1.0 / torch.bincount(labels).float()[labels]
        sampler = WeightedRandomSampler(weights, len(labels), generator=torch.Generator().manual_seed(self.args.seed))
        loader = DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size, sampler=sampler)
        return loader


def main():
    set_seed(3)
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                        max_position_embeddings=32, num_labels=2, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0)
    args = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=4, learning_rate=1e-3, use_cpu=True,
                             save_strategy="no", logging_steps=4, report_to=[], disable_tqdm=True, seed=3,
                             average_tokens_across_devices=False)
    trainer = BalancedTrainer(model=BertForSequenceClassification(config), args=args, train_dataset=Intents())
    trainer.train()


if __name__ == "__main__":
    main()
