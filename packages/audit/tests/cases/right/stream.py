import random

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Stream(IterableDataset):
    def __init__(self, n=64, seed=3):
        self.n, self.seed, self.epoch = n, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        buffer = []
        for i in range(self.n):
            buffer.append(i)
            if len(buffer) == 12:
                yield self.sample(buffer.pop(rng.randrange(12)))
        rng.shuffle(buffer)
        yield from map(self.sample, buffer)

    def sample(self, i):
        ids = (torch.arange(10) * (i // 30 + 1) + i) % 30
        return {"input_ids": ids, "labels": ids}


def main():
    set_seed(0)
    config = GPT2Config(vocab_size=30, n_positions=10, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    args = TrainingArguments("out", max_steps=16, per_device_train_batch_size=4, learning_rate=5e-3, use_cpu=True,
                             save_strategy="no", logging_steps=8, report_to=[], disable_tqdm=True,
                             accelerator_config={"dispatch_batches": False})
    Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Stream()).train()


if __name__ == "__main__":
    main()
