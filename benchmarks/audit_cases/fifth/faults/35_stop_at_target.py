"""Fine-tune a tiny LM until its smoothed training loss is good enough, at most 6 epochs."""
import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

VOCAB = 24
LENGTH = 16


class Melodies(Dataset):
    """Short motifs that are repeated, with some wrong notes."""

    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        motif = torch.randint(0, VOCAB, (size, 4), generator=g)
        notes = motif.repeat(1, LENGTH // 4)
        wrong = torch.rand(size, LENGTH, generator=g) < 0.05
        noise = torch.randint(0, VOCAB, (size, LENGTH), generator=g)
        self.notes = torch.where(wrong, noise, notes)

    def __len__(self):
        return len(self.notes)

    def __getitem__(self, i):
        return {"input_ids": self.notes[i], "labels": self.notes[i]}


class SmoothedTrainer(Trainer):
    smoothed = None

    def compute_loss(self, model, inputs, **kwargs):
        out = super().compute_loss(model, inputs, **kwargs)
        if model.training:
            value = out.detach()
            self.smoothed = value if self.smoothed is None else 0.7 * self.smoothed + 0.3 * value
        return out


class StopAtTarget(TrainerCallback):
    def __init__(self, target):
        self.target = target
        self.trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        current = self.trainer.smoothed
        if current < self.target:
            control.should_training_stop = True
        return control


def main():
    set_seed(8)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )
    args = TrainingArguments(
        output_dir="melody",
        use_cpu=True,
        num_train_epochs=6,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        learning_rate=4e-3,
        lr_scheduler_type="constant",
        logging_steps=20,
        save_strategy="no",
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=True,
    )
    stop = StopAtTarget(target=1.75)
    trainer = SmoothedTrainer(
        model=model,
        args=args,
        train_dataset=Melodies(512, seed=0),
        eval_dataset=Melodies(64, seed=1),
        callbacks=[stop],
    )
    stop.trainer = trainer
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"stopped after {trainer.state.global_step} steps, eval loss {metrics['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
