"""Token tagging with a tiny BERT. Extra training statistics (token accuracy, recall of entities) go to the log."""
import json
import os

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments, set_seed

VOCAB, SEQ = 90, 20


class Tags(Dataset):
    """Tokens below 30 open an entity of two tokens; everything else is outside."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, VOCAB, (n, SEQ), generator=g)
        opens = (self.ids < 30) & (torch.rand(n, SEQ, generator=g) < 0.9)
        self.tags = torch.zeros(n, SEQ, dtype=torch.long)
        self.tags[opens] = 1
        inside = torch.roll(opens, 1, dims=1)
        inside[:, 0] = False
        self.tags[inside & ~opens] = 2

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.tags[i]}


class TaggingTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reset_counts()

    def reset_counts(self):
        self.counts = torch.zeros(4)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if model.training:
            guess, gold = outputs.logits.detach().argmax(-1), inputs["labels"]
            hit = guess.eq(gold)
            entity = gold > 0
            self.counts += torch.tensor(
                [hit.sum(), hit.numel(), (hit & entity).sum(), entity.sum()], dtype=torch.float
            )
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, start_time=None):
        if "loss" in logs:
            hits, total, entity_hits, entities = self.counts.tolist()
            logs["token_accuracy"] = round(hits / total, 4)
            logs["entity_recall"] = round(entity_hits / max(entities, 1), 4)
            self.reset_counts()
        super().log(logs, start_time)


def main():
    set_seed(13)
    model = BertForTokenClassification(
        BertConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=SEQ, num_labels=3,
        )
    )
    args = TrainingArguments(
        output_dir="runs/tags",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        average_tokens_across_devices=False,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        seed=13,
    )
    trainer = TaggingTrainer(model=model, args=args, train_dataset=Tags(384, 1))
    trainer.train()
    if trainer.is_world_process_zero():
        os.makedirs(args.output_dir, exist_ok=True)
        with open(os.path.join(args.output_dir, "history.json"), "w") as f:
            json.dump(trainer.state.log_history, f, indent=1)
        last = [h for h in trainer.state.log_history if "token_accuracy" in h][-1]
        print("last interval:", last["token_accuracy"], last["entity_recall"])


if __name__ == "__main__":
    main()
