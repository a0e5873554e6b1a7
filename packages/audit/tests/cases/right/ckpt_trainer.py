"""Causal LM, gradient checkpointing, accumulation, and a loss function that counts the tokens of the whole step."""
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)
VOCAB = 40


def focal_token_loss(outputs, labels, num_items_in_batch=None):
    logits, target = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    nll = F.cross_entropy(logits, target, ignore_index=-100, reduction="none")
    total = ((1 - torch.exp(-nll.detach())) * nll).sum()
    return total / (num_items_in_batch if num_items_in_batch is not None else (target != -100).sum())


def collate(rows):
    width = max(len(r) for r in rows)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    for i, r in enumerate(rows):
        ids[i, : len(r)], labels[i, : len(r)] = r, r
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


def sequences(n, seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        start, step, length = (int(torch.randint(lo, hi, (), generator=g)) for lo, hi in ((1, 40), (1, 4), (4, 14)))
        rows.append((start + step * torch.arange(length)) % (VOCAB - 1) + 1)
    return rows


def main():
    set_seed(28)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32))
    args = TrainingArguments(
        output_dir="llama", use_cpu=True, num_train_epochs=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=3, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False}, learning_rate=5e-3, warmup_steps=3,
        logging_steps=5, eval_strategy="epoch", save_strategy="no", remove_unused_columns=False,
        report_to="none", disable_tqdm=True, prediction_loss_only=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=sequences(170, 0), eval_dataset=sequences(40, 1),
                      data_collator=collate, compute_loss_func=focal_token_loss)
    trainer.train()
    if trainer.is_world_process_zero():
        print("steps", trainer.state.global_step, [round(h["eval_loss"], 4) for h in trainer.state.log_history if "eval_loss" in h])


if __name__ == "__main__":
    main()
