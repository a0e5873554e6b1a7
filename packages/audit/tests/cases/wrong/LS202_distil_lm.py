"""Distil a bigger causal language model into a small student with the Trainer."""
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

VOCAB = 32
LENGTH = 24


class CountingSequences(Dataset):
    """Sequences start, start + step, start + 2 * step, ... modulo the vocabulary."""

    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, VOCAB, (size, 1), generator=g)
        step = torch.randint(1, 6, (size, 1), generator=g)
        self.ids = (start + step * torch.arange(LENGTH)) % VOCAB

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i]}


def build(layers, width):
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=2,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )


class DistillTrainer(Trainer):
    def __init__(self, *args, teacher, temperature=2.0, alpha=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval().requires_grad_(False)
        self.temperature = temperature
        self.alpha = alpha

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"]
        student = self.model(input_ids=ids)
        with torch.no_grad():
            target = self.teacher(input_ids=ids).logits
        t = self.temperature
        soft = F.kl_div(
            F.log_softmax(student.logits[:, :-1] / t, -1).flatten(0, 1),
            F.log_softmax(target[:, :-1] / t, -1).flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        ) * t * t
        hard = F.cross_entropy(student.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss = self.alpha * soft + (1 - self.alpha) * hard
        return (loss, student) if return_outputs else loss


def main():
    set_seed(3)
    teacher = build(layers=3, width=48)
    student = build(layers=1, width=32)
    args = TrainingArguments(
        output_dir="distil",
        use_cpu=True,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = DistillTrainer(
        model=student, args=args, train_dataset=CountingSequences(512, seed=0), teacher=teacher
    )
    result = trainer.train()
    trainer.save_model("distil/student")
    if trainer.is_world_process_zero():
        print(f"final train loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
