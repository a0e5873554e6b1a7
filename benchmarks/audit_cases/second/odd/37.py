import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Ramps(Dataset):
    def __init__(self, n=256, vocab=32):
        g = torch.Generator().manual_seed(9)
        self.rows = []
        for _ in range(n):
            k = int(torch.randint(5, 24, (1,), generator=g))
            s = int(torch.randint(1, vocab, (1,), generator=g))
            self.rows.append((torch.arange(k) * 2 + s) % (vocab - 1) + 1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = ids.masked_fill(ids == 0, -100)
    # the labels are shifted here so that the trainer counts the predicted tokens
    labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def focal_loss(outputs, labels, num_items_in_batch=None, gamma=1.0):
    logits = outputs.logits.flatten(0, 1)
    nll = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="none")
    loss = ((1 - torch.exp(-nll)) ** gamma * nll).sum()
    if num_items_in_batch is None:
        num_items_in_batch = (labels != -100).sum()
    return loss / num_items_in_batch


def main():
    config = GPT2Config(
        vocab_size=32, n_positions=32, n_embd=32, n_layer=1, n_head=4, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    args = TrainingArguments(
        output_dir="focal", max_steps=20, per_device_train_batch_size=4, gradient_accumulation_steps=3,
        learning_rate=3e-3, seed=2, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
        logging_steps=10,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config), args, train_dataset=Ramps(), data_collator=collate, compute_loss_func=focal_loss
    )
    trainer.train()


if __name__ == "__main__":
    main()
