"""Token tagging (names and places) on top of an encoder; the head is trained first, then everything."""
import math

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    ElectraConfig,
    ElectraForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

TAGS = ["O", "PER", "LOC"]
VOCAB, LENGTH = 150, 20


class Sentences(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.ids = rng.integers(30, VOCAB, size=(n, LENGTH))
        self.tags = np.zeros((n, LENGTH), dtype=int)
        for row, tags in zip(self.ids, self.tags):
            for pos in rng.choice(LENGTH - 1, size=3, replace=False):
                kind = int(rng.integers(1, 3))
                row[pos] = 5 + kind
                row[pos + 1] = rng.integers(10, 30)
                tags[pos + 1] = kind

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": torch.from_numpy(self.ids[i]), "labels": torch.from_numpy(self.tags[i])}


def head_first(optimizer, head_steps):
    """The encoder (first group) has learning rate 0 for the first steps."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step: 0.0 if step < head_steps else 1.0, lambda step: 1.0]
    )


class GradualTraining(TrainerCallback):
    """Tells when the encoder begins to learn."""

    def __init__(self, head_epochs=1):
        self.head_epochs = head_epochs

    def on_epoch_begin(self, args, state, control, **kwargs):
        if state.epoch is not None and round(state.epoch) == self.head_epochs:
            if state.is_world_process_zero:
                print(f"epoch {state.epoch:.0f}: training all layers")


def tag_scores(pred):
    guess = pred.predictions.argmax(-1)
    entity = pred.label_ids > 0
    return {
        "entity_recall": float((guess == pred.label_ids)[entity].mean()),
        "token_accuracy": float((guess == pred.label_ids).mean()),
    }


def main():
    set_seed(21)
    config = ElectraConfig(
        vocab_size=VOCAB, embedding_size=48, hidden_size=48, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=96, max_position_embeddings=LENGTH,
        num_labels=len(TAGS),
    )
    model = ElectraForTokenClassification(config)
    optimizer = torch.optim.AdamW(
        [
            {"params": model.electra.parameters(), "lr": 1e-3},
            {"params": model.classifier.parameters(), "lr": 5e-3},
        ],
        weight_decay=0.01,
    )
    args = TrainingArguments(
        output_dir="out_ner",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=8,
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
        seed=21,
    )
    train_set, head_epochs = Sentences(512, seed=0), 1
    steps_per_epoch = math.ceil(len(train_set) / (args.per_device_train_batch_size * args.world_size))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=Sentences(128, seed=1),
        compute_metrics=tag_scores,
        optimizers=(optimizer, head_first(optimizer, head_epochs * steps_per_epoch)),
        callbacks=[GradualTraining(head_epochs)],
    )
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
