import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Counting(Dataset):
    def __init__(self, n=256, length=12, vocab=40):
        g = torch.Generator().manual_seed(1)
        start = torch.randint(0, vocab, (n, 1), generator=g)
        self.ids = (start + torch.arange(length)) % vocab

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class SmoothTrainer(Trainer):
    """Causal LM loss with label smoothing."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        out = model(input_ids=inputs["input_ids"])
        logits = out.logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.1)
        return (loss, out) if return_outputs else loss


def main():
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )
    args = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        learning_rate=3e-3,
        max_grad_norm=0.0,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = SmoothTrainer(model=model, args=args, train_dataset=Counting())
    trainer.train()


if __name__ == "__main__":
    main()
