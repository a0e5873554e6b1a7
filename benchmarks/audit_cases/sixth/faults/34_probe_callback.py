"""Character language model (tiny Llama) with a perplexity probe on a rare-words set after every epoch."""
import math

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

WORDS = "the quick brown fox jumps over a lazy dog and runs into deep green forest near cold river".split()
RARE = "quartz jinx vortex zephyr waltz".split()
CHARS = sorted(set("".join(WORDS + RARE)) | {" "})
STOI = {c: i for i, c in enumerate(CHARS)}
BLOCK = 32


class CharBlocks(Dataset):
    def __init__(self, words, n, seed):
        g = torch.Generator().manual_seed(seed)
        picks = torch.randint(len(words), (n * BLOCK,), generator=g).tolist()
        text = " ".join(words[i] for i in picks)
        self.data = torch.tensor([STOI[c] for c in text[: n * BLOCK]])

    def __len__(self):
        return len(self.data) // BLOCK

    def __getitem__(self, i):
        x = self.data[i * BLOCK : (i + 1) * BLOCK]
        return {"input_ids": x, "labels": x.clone()}


class PerplexityProbe(TrainerCallback):
    def __init__(self, trainer, dataset, path):
        self.trainer = trainer
        self.dataset = dataset
        self.path = path

    def on_epoch_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        result = self.trainer.predict(self.dataset, metric_key_prefix="probe")
        ppl = math.exp(min(result.metrics["probe_loss"], 20.0))
        with open(self.path, "a") as f:
            f.write(f"{state.epoch:.1f}\t{state.global_step}\t{ppl:.3f}\n")
        print(f"epoch {state.epoch:.1f}: probe perplexity {ppl:.2f}")


def main():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(CHARS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=BLOCK,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    args = TrainingArguments(
        output_dir="charlm",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=5,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=CharBlocks(WORDS, 320, 1),
    )
    trainer.add_callback(PerplexityProbe(trainer, CharBlocks(RARE, 48, 2), "probe.tsv"))
    trainer.train()
    trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
