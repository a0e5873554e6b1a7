"""Two stages with two Trainers: LoRA adapters on a frozen language model first, then the merged model as a whole."""
import random

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCAB, BLOCK = 32, 24


class Blocks(Dataset):
    """Counting sequences with random starts and strides, packed to blocks of one length."""

    def __init__(self, n, seed):
        rng = random.Random(seed)
        stream = []
        while len(stream) < n * BLOCK:
            start, stride, k = rng.randrange(1, VOCAB), rng.choice([1, 2, 3]), rng.randint(5, 15)
            stream += [0] + [1 + (start + stride * j) % (VOCAB - 1) for j in range(k)]
        self.blocks = torch.tensor(stream[: n * BLOCK]).view(n, BLOCK)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, i):
        return {"input_ids": self.blocks[i], "labels": self.blocks[i].clone()}


def run_args(stage, lr, epochs):
    return TrainingArguments(
        output_dir=f"runs/stage-{stage}", use_cpu=True, num_train_epochs=epochs, per_device_train_batch_size=8,
        per_device_eval_batch_size=16, gradient_accumulation_steps=2, learning_rate=lr, warmup_steps=4,
        logging_steps=8, save_strategy="no", report_to="none", dataloader_pin_memory=False, seed=24,
    )


def main():
    set_seed(24)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=BLOCK, bos_token_id=0, eos_token_id=0,
        )
    )
    train, test = Blocks(512, 1), Blocks(64, 2)

    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], modules_to_save=["lm_head"])
    first = Trainer(get_peft_model(base, lora), run_args(1, 1e-2, 2), train_dataset=train, eval_dataset=test)
    first.train()
    before = first.evaluate()

    merged = first.accelerator.unwrap_model(first.model).merge_and_unload()
    merged.requires_grad_(True)
    second = Trainer(merged, run_args(2, 3e-3, 2), train_dataset=train, eval_dataset=test)
    second.train()
    after = second.evaluate()
    if second.is_world_process_zero():
        print(f"loss after the adapters {before['eval_loss']:.3f}, after all weights {after['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
