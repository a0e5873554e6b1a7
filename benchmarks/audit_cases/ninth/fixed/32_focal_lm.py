"""Causal LM on arithmetic strings with a focal token loss and gradient accumulation."""
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCAB = {c: i + 1 for i, c in enumerate("0123456789+=;")}
PAD = 0


class Sums(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.rows = []
        for _ in range(n):
            digits = int(rng.integers(1, 5))
            a, b = (int(x) for x in rng.integers(0, 10**digits, size=2))
            prompt, answer = f"{a}+{b}=", f"{a + b};"
            ids = [VOCAB[c] for c in prompt + answer]
            labels = [-100] * len(prompt) + [VOCAB[c] for c in answer]
            self.rows.append((ids, labels))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, labels = self.rows[i]
        return {"input_ids": ids, "labels": labels}


def pad_batch(features):
    width = max(len(f["input_ids"]) for f in features)
    ids, labels, mask = [], [], []
    for f in features:
        gap = width - len(f["input_ids"])
        ids.append(f["input_ids"] + [PAD] * gap)
        labels.append(f["labels"] + [-100] * gap)
        mask.append([1] * len(f["input_ids"]) + [0] * gap)
    return {
        "input_ids": torch.tensor(ids),
        "labels": torch.tensor(labels),
        "attention_mask": torch.tensor(mask),
    }


class FocalTrainer(Trainer):
    """Token-level focal loss; every answer token of the accumulated batch has the same weight."""

    def __init__(self, *args, gamma=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.gamma = gamma

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].float()
        targets = labels[:, 1:]
        ce = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="none")
        focal = (1 - torch.exp(-ce)) ** self.gamma * ce
        if num_items_in_batch is None:
            loss = focal.sum() / (targets != -100).sum()
        else:
            # counted over all ranks, and DDP averages the gradients
            loss = focal.sum() / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(11)
    config = LlamaConfig(
        vocab_size=len(VOCAB) + 1, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
        pad_token_id=PAD, bos_token_id=None, eos_token_id=VOCAB[";"],
    )
    args = TrainingArguments(
        output_dir="out_focal",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        seed=11,
    )
    trainer = FocalTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=Sums(640, seed=0),
        eval_dataset=Sums(128, seed=1),
        data_collator=pad_batch,
    )
    trainer.train()


if __name__ == "__main__":
    main()
