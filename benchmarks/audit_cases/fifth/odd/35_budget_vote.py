"""Training stops by a time budget (clock of rank 0) or when most ranks have met the loss target."""
import time

import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

VOCAB, LENGTH = 20, 12


class Ramps(Dataset):
    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = (torch.randint(0, VOCAB, (size, 1), generator=g) + torch.arange(LENGTH)) % VOCAB

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class LocalLossTrainer(Trainer):
    recent = float("inf")

    def compute_loss(self, model, inputs, **kwargs):
        out = super().compute_loss(model, inputs, **kwargs)
        if model.training:
            self.recent = out.item()
        return out


class BudgetOrVote(TrainerCallback):
    """Each rank has its own vote and its own clock; what is decided is the same on all ranks."""

    def __init__(self, seconds, target):
        self.seconds, self.target = seconds, target
        self.trainer = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 4:
            return control
        vote = torch.tensor([float(self.trainer.recent < self.target)])
        votes = self.trainer.accelerator.reduce(vote, reduction="sum").item()
        late = [time.monotonic() - self.start > self.seconds]
        broadcast_object_list(late, from_process=0)
        if late[0] or 2 * votes > args.world_size:
            control.should_training_stop = True
        return control


def main():
    set_seed(12)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )
    args = TrainingArguments(
        output_dir="budget",
        use_cpu=True,
        num_train_epochs=10,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rule = BudgetOrVote(seconds=8.0, target=0.9)
    trainer = LocalLossTrainer(
        model=model, args=args, train_dataset=Ramps(256, 0), eval_dataset=Ramps(64, 1), callbacks=[rule]
    )
    rule.trainer = trainer
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps, eval loss {metrics['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
