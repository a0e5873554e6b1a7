import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCAB = 40


class Lines(Dataset):
    """Counting sequences of different lengths, padded in the collator."""

    def __init__(self, n=256):
        g = torch.Generator().manual_seed(0)
        self.rows = []
        for _ in range(n):
            start, length = torch.randint(1, VOCAB, (2,), generator=g).tolist()
            length = 4 + length % 20
            self.rows.append((torch.arange(length) + start) % (VOCAB - 1) + 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


def collate(items):
    ids = torch.nn.utils.rnn.pad_sequence([i["input_ids"] for i in items], batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class SmoothedTrainer(Trainer):
    """Language modelling with label smoothing."""

    smoothing = 0.05

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=self.smoothing)
        return (loss, outputs) if return_outputs else loss


def main():
    args = TrainingArguments(
        output_dir="runs", max_steps=24, per_device_train_batch_size=4, gradient_accumulation_steps=4,
        learning_rate=3e-3, max_grad_norm=0.0, optim="sgd", seed=0, use_cpu=True, save_strategy="no",
        report_to="none", disable_tqdm=True, logging_steps=8,
    )
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    trainer = SmoothedTrainer(GPT2LMHeadModel(config), args, train_dataset=Lines(), data_collator=collate)
    trainer.train()


if __name__ == "__main__":
    main()
