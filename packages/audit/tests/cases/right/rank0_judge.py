"""Rank 0 alone judges the model after each epoch on the whole validation set and tells the others."""
import copy

import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader, Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

VOCAB, LENGTH = 40, 10


class Tickets(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 3, (size,), generator=g)
        self.x = torch.randint(8, VOCAB, (size, LENGTH), generator=g)
        for i, label in enumerate(self.y.tolist()):
            self.x[i, torch.randperm(LENGTH, generator=g)[:2]] = 2 + label

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i]}


class Judge(TrainerCallback):
    """Plain loop over the bare module: no collective is inside the part that only rank 0 runs."""

    def __init__(self, data, patience):
        self.data, self.patience = data, patience
        self.best, self.bad, self.kept = -1.0, 0, None

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        box = [None]
        if state.is_world_process_zero:
            model.eval()
            right = 0
            with torch.no_grad():
                for batch in DataLoader(self.data, batch_size=32):
                    right += (model(batch["input_ids"]).logits.argmax(-1) == batch["labels"]).sum().item()
            model.train()
            box[0] = right / len(self.data)
            print(f"epoch {state.epoch:.0f}  accuracy {box[0]:.4f}")
        broadcast_object_list(box, from_process=0)
        if box[0] > self.best:
            self.best, self.bad = box[0], 0
            self.kept = copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
            control.should_training_stop = self.bad >= self.patience
        return control

    def on_train_end(self, args, state, control, model=None, **kwargs):
        model.load_state_dict(self.kept)


def main():
    set_seed(15)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=3,
    )
    args = TrainingArguments(
        output_dir="tickets",
        use_cpu=True,
        num_train_epochs=6,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_strategy="epoch",
        save_strategy="no",
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
    )
    judge = Judge(Tickets(101, seed=1), patience=1)
    trainer = Trainer(
        model=BertForSequenceClassification(config), args=args, train_dataset=Tickets(512, 0), callbacks=[judge]
    )
    trainer.train()
    trainer.save_model("tickets/best")
    if trainer.is_world_process_zero():
        print(f"kept the model with accuracy {judge.best:.4f}")


if __name__ == "__main__":
    main()
