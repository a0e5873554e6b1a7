import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Sequences(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = (torch.arange(16) * (1 + i // 50) + i) % 50
        return {"input_ids": ids, "labels": ids.clone()}


class SmoothedTrainer(Trainer):
    """Causal LM with label smoothing."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        loss = F.cross_entropy(logits, targets, label_smoothing=0.1)
        if num_items_in_batch is not None:
            loss = loss / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(1)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=5e-3,
        max_grad_norm=0.0,
        optim="sgd",
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = SmoothedTrainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Sequences())
    trainer.train()


if __name__ == "__main__":
    main()
