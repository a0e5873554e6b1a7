"""Intent classifier trained with a focal loss that is given to the Trainer as compute_loss_func."""
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

WORDS = 60
INTENTS = 5
LENGTH = 10


class Utterances(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, INTENTS, (size,), generator=g)
        self.ids = torch.randint(10, WORDS, (size, LENGTH), generator=g)
        for row, label in enumerate(self.labels.tolist()):
            spots = torch.randperm(LENGTH, generator=g)[:3]
            self.ids[row, spots] = 2 + label

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def focal_loss(outputs, labels, num_items_in_batch=None, gamma=2.0):
    logp = F.log_softmax(outputs.logits, dim=-1)
    logp = logp.gather(1, labels[:, None]).squeeze(1)
    per_example = -((1 - logp.exp()) ** gamma) * logp
    return per_example.mean()


def accuracy(pred):
    return {"accuracy": float(np.mean(pred.predictions.argmax(-1) == pred.label_ids))}


def main():
    set_seed(21)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=INTENTS,
    )
    args = TrainingArguments(
        output_dir="intents",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=Utterances(512, seed=0),
        eval_dataset=Utterances(128, seed=1),
        compute_loss_func=focal_loss,
        compute_metrics=accuracy,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        for row in trainer.state.log_history:
            if "loss" in row:
                print(f"step {row['step']:3d}  loss {row['loss']:.4f}")


if __name__ == "__main__":
    main()
