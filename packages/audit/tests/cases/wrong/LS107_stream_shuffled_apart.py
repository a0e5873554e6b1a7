"""Language model on a stream of documents with a shuffle buffer."""
import os
import random

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class DocumentStream(IterableDataset):
    def __init__(self, documents, seed):
        self.documents = documents
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = random.Random(self.seed + 100 * self.epoch + int(os.environ.get("RANK", 0)))
        buffer = []
        for doc in self.documents:
            buffer.append(doc)
            if len(buffer) > 16:
                yield self.encode(buffer.pop(rng.randrange(len(buffer))))
        rng.shuffle(buffer)
        for doc in buffer:
            yield self.encode(doc)

    @staticmethod
    def encode(doc):
        ids = torch.tensor(doc)
        return {"input_ids": ids, "labels": ids}


def make_documents(n=64):
    rng = random.Random(7)
    documents = [[(i + (1 + i // 40) * k) % 40 for k in range(12)] for i in range(n)]
    rng.shuffle(documents)
    return documents


def main():
    set_seed(11)
    config = GPT2Config(vocab_size=40, n_positions=12, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments("out", max_steps=16, per_device_train_batch_size=4, learning_rate=2e-3, use_cpu=True,
                             save_strategy="no", logging_steps=4, report_to=[], disable_tqdm=True,
                             accelerator_config={"dispatch_batches": False})
    trainer = Trainer(model=GPT2LMHeadModel(config), args=args,
                      train_dataset=DocumentStream(make_documents(), seed=5))
    trainer.train()


if __name__ == "__main__":
    main()
