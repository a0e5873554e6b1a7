import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput


class Windows(Dataset):
    def __init__(self, n=512):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 16, generator=g).cumsum(1)
        self.y = (self.x[:, -1] > self.x[:, 0]).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class TrendConfig(PretrainedConfig):
    model_type = "trend"


class TrendModel(PreTrainedModel):
    config_class = TrendConfig

    def __init__(self, config):
        super().__init__(config)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
        self.post_init()

    def forward(self, x, labels=None):
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return SequenceClassifierOutput(loss=loss, logits=logits)


class MyTrainer(Trainer):
    def get_train_dataloader(self):
        sampler = DistributedSampler(self.train_dataset, shuffle=True, seed=self.args.seed)
        loader = DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
        )
        return self.accelerator.prepare(loader)


def main():
    args = TrainingArguments(
        output_dir="out", num_train_epochs=2, per_device_train_batch_size=8, learning_rate=5e-3,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="epoch",
    )
    trainer = MyTrainer(TrendModel(TrendConfig()), args, train_dataset=Windows())
    trainer.train()


if __name__ == "__main__":
    main()
