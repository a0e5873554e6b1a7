import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, set_seed

from kd40.trainer import DistillationTrainer


class Counts(Dataset):
    """Is token 7 more frequent than token 8?"""

    def __init__(self, n=256):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, 11, (n, 12), generator=g)
        self.labels = ((self.ids == 7).sum(1) > (self.ids == 8).sum(1)).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def bert(width, layers):
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=16, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2,
            intermediate_size=2 * width, max_position_embeddings=16, num_labels=2,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )


def train_teacher(model, data, steps=40):
    # the same seed on all ranks: every rank gets the same teacher
    set_seed(11)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        i = torch.randint(len(data), (32,))
        opt.zero_grad()
        model(input_ids=data.ids[i], labels=data.labels[i]).loss.backward()
        opt.step()
    return model


def main():
    set_seed(10)
    data = Counts()
    teacher = train_teacher(bert(32, 2), data)
    args = TrainingArguments(
        output_dir="kd", num_train_epochs=2, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        learning_rate=2e-3, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
        logging_strategy="epoch",
    )
    DistillationTrainer(bert(16, 1), args, train_dataset=data, teacher=teacher).train()


if __name__ == "__main__":
    main()
