"""Pretrain a tiny GPT-2 on synthetic grammar sentences, with a z-loss regulariser."""
import random

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

PAD, BOS, EOS = 0, 1, 2
VOCAB = 64


class GrammarDataset(Dataset):
    """Sentences of the form BOS (noun verb)+ EOS, of different lengths."""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            row = [BOS]
            for _ in range(rng.randint(2, 14)):
                noun = rng.randint(3, 30)
                row += [noun, 31 + (noun * 7) % 30]
            self.rows.append(row + [EOS])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


def collate(rows):
    width = max(len(r["input_ids"]) for r in rows)
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, r in enumerate(rows):
        n = len(r["input_ids"])
        ids[i, :n] = torch.tensor(r["input_ids"])
        mask[i, :n] = 1
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class ZLossTrainer(Trainer):
    z_weight = 1e-4

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"][:, 1:]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits = outputs.logits[:, :-1].float()
        keep = labels != -100
        ce = F.cross_entropy(logits[keep], labels[keep], reduction="sum")
        z = (torch.logsumexp(logits[keep], dim=-1) ** 2).sum()
        total = ce + self.z_weight * z
        if num_items_in_batch is None:
            num_items_in_batch = keep.sum()
        loss = total / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(7)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=BOS, eos_token_id=EOS)
    )
    args = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.2,
        optim="sgd",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_steps=5,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=7,
    )
    trainer = ZLossTrainer(
        model=model,
        args=args,
        train_dataset=GrammarDataset(320, 0),
        eval_dataset=GrammarDataset(64, 1),
        data_collator=collate,
    )
    trainer.train()
    trainer.save_model("out/final")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
