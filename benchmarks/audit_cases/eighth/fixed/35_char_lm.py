"""Train a small GPT-NeoX on strings of varying length; the loss is a mean over all characters of the step."""
import random

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments, set_seed

CHARS = "abcdefghijklmnopqrstuvwxyz ."
PAD = len(CHARS)


class Sentences(Dataset):
    words = ["sun", "moon", "river", "stone", "bird", "green", "walks", "sings", "under", "the", "a", "old"]

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            text = " ".join(rng.choice(self.words) for _ in range(rng.randint(2, 9))) + "."
            self.rows.append([CHARS.index(c) for c in text][:48])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


def collate(items):
    width = max(len(it["input_ids"]) for it in items)
    ids = torch.full((len(items), width), PAD)
    labels = torch.full((len(items), width), -100)
    mask = torch.zeros(len(items), width, dtype=torch.long)
    for row, it in enumerate(items):
        n = len(it["input_ids"])
        ids[row, :n] = torch.tensor(it["input_ids"])
        labels[row, :n] = torch.tensor(it["input_ids"])
        mask[row, :n] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class CharTrainer(Trainer):
    def __init__(self, *args, z_weight=1e-3, **kwargs):
        super().__init__(*args, **kwargs)
        self.z_weight = z_weight

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"][:, 1:]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits = outputs.logits[:, :-1]
        keep = labels != -100
        nll = F.cross_entropy(logits[keep], labels[keep], reduction="sum")
        z = torch.logsumexp(logits[keep], dim=-1).pow(2).sum()
        loss = (nll + self.z_weight * z) / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(9)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=len(CHARS) + 1, max_position_embeddings=48, hidden_size=48, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=96, bos_token_id=PAD, eos_token_id=PAD,
        )
    )
    args = TrainingArguments(
        output_dir="runs/charlm",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        seed=9,
    )
    trainer = CharTrainer(model=model, args=args, train_dataset=Sentences(512, 4), data_collator=collate)
    trainer.train()
    losses = [h["loss"] for h in trainer.state.log_history if "loss" in h]
    if trainer.is_world_process_zero():
        print("loss per character:", " ".join(f"{v:.3f}" for v in losses))


if __name__ == "__main__":
    main()
