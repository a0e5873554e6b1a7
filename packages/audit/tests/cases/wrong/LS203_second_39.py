import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class Toy(Dataset):
    def __init__(self, n=256, length=12):
        g = torch.Generator().manual_seed(3)
        self.ids = torch.randint(5, 60, (n, length), generator=g)
        self.labels = (self.ids.float().mean(1) > 32).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


class GradualUnfreeze(TrainerCallback):
    """Trains the classifier alone first; the encoder joins at the given epoch."""

    def __init__(self, encoder, epoch):
        self.encoder = encoder
        self.epoch = epoch

    def on_epoch_begin(self, args, state, control, **kwargs):
        if round(state.epoch or 0) == self.epoch:
            self.encoder.requires_grad_(True)


def freeze(module: nn.Module):
    module.requires_grad_(False)


def main():
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16, num_labels=2,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    freeze(model.bert.encoder)
    args = TrainingArguments(
        output_dir="bert", num_train_epochs=3, per_device_train_batch_size=8, learning_rate=1e-3, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="epoch", seed=1,
    )
    trainer = Trainer(
        model, args, train_dataset=Toy(), callbacks=[GradualUnfreeze(model.bert.encoder, epoch=1)]
    )
    trainer.train()


if __name__ == "__main__":
    main()
