"""Instruction tuning of a small Llama: loss on the answer tokens only, with label smoothing and a z-loss."""
import random

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCAB, PAD, BOS, SEP, EOS = 64, 0, 1, 2, 3


class Recipes(Dataset):
    """The answer repeats the prompt in reverse order; lengths differ a lot."""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.items = []
        for _ in range(n):
            prompt = [rng.randrange(4, VOCAB) for _ in range(rng.choice([3, 4, 5, 12, 16]))]
            self.items.append(([BOS] + prompt + [SEP], prompt[::-1] + [EOS]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        prompt, answer = self.items[i]
        return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def collate(batch):
    width = max(len(b["input_ids"]) for b in batch)

    def pad(name, value):
        return torch.tensor([b[name] + [value] * (width - len(b[name])) for b in batch])

    ids = pad("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": pad("labels", -100)}


class AnswerTrainer(Trainer):
    smoothing, z_weight = 0.05, 1e-4

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"][:, 1:].reshape(-1)
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits = outputs.logits[:, :-1].reshape(-1, VOCAB).float()
        keep = labels != -100
        token_loss = F.cross_entropy(logits[keep], labels[keep], label_smoothing=self.smoothing, reduction="sum")
        z_loss = self.z_weight * torch.logsumexp(logits[keep], dim=-1).pow(2).sum()
        n_tokens = num_items_in_batch if num_items_in_batch is not None else keep.sum()
        loss = (token_loss + z_loss) / n_tokens
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(43)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=48, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )
    args = TrainingArguments(
        output_dir="recipe-llama", use_cpu=True, num_train_epochs=2, per_device_train_batch_size=8,
        per_device_eval_batch_size=32, gradient_accumulation_steps=2, learning_rate=0.3, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=1.0, logging_steps=5, logging_first_step=True,
        eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True, seed=43,
    )
    trainer = AnswerTrainer(
        model=LlamaForCausalLM(config), args=args, train_dataset=Recipes(640, seed=1),
        eval_dataset=Recipes(128, seed=2), data_collator=collate,
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"validation loss {metrics['eval_loss']:.4f}")
    trainer.save_model("recipe-llama/final")


if __name__ == "__main__":
    main()
