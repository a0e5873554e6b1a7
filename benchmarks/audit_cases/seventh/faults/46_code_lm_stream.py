"""Language model on shards of token files, read as a stream (the corpus does not fit in memory)."""
import glob
import os

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator, set_seed

VOCAB, BLOCK, SHARDS, BLOCKS_PER_SHARD = 96, 32, 8, 80
DATA = "corpus"


def write_shards():
    """Every shard is another 'project' with its own habit of continuing a token."""
    os.makedirs(DATA, exist_ok=True)
    for s in range(SHARDS):
        rng = np.random.default_rng(s)
        step = 1 + 2 * s
        tokens = np.zeros(BLOCKS_PER_SHARD * BLOCK, dtype=np.int64)
        for i in range(1, len(tokens)):
            tokens[i] = rng.integers(VOCAB) if rng.random() < 0.1 else (tokens[i - 1] + step) % VOCAB
        np.save(os.path.join(DATA, f"shard_{s:03d}.npy"), tokens)


class ShardStream(IterableDataset):
    def __init__(self, files, rank, world_size):
        self.files = files[rank::world_size]
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(len(self.files))
        for k in order:
            tokens = np.load(self.files[k], mmap_mode="r")
            for start in range(0, len(tokens), BLOCK):
                block = torch.from_numpy(np.array(tokens[start:start + BLOCK]))
                yield {"input_ids": block, "labels": block.clone()}


def main():
    set_seed(37)
    args = TrainingArguments(
        output_dir="code-lm", use_cpu=True, max_steps=60, per_device_train_batch_size=8, learning_rate=3e-3,
        warmup_steps=6, lr_scheduler_type="cosine", logging_steps=10, save_strategy="no", report_to=[],
        disable_tqdm=True, seed=37,
    )
    with args.main_process_first(desc="write shards"):
        if args.process_index == 0:
            write_shards()
    files = sorted(glob.glob(os.path.join(DATA, "shard_*.npy")))

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=BLOCK, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=args, data_collator=default_data_collator,
        train_dataset=ShardStream(files, args.process_index, args.world_size),
    )
    trainer.train()

    if trainer.is_world_process_zero():
        model = trainer.model.eval()
        for path in files:
            blocks = torch.from_numpy(np.load(path)).view(-1, BLOCK)[:16]
            with torch.no_grad():
                print(os.path.basename(path), f"loss {model(input_ids=blocks, labels=blocks).loss.item():.3f}")
    trainer.save_model("code-lm/final")


if __name__ == "__main__":
    main()
