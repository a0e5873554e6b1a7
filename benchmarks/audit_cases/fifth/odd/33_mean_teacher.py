"""Semi-supervised training with a mean teacher: the teacher is a moving average of the student."""
import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

VOCAB, LENGTH, CLASSES = 40, 12, 3


class Pages(Dataset):
    """labelled marks the rows whose label may be used."""

    def __init__(self, size, seed, share):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, CLASSES, (size,), generator=g)
        self.x = torch.randint(8, VOCAB, (size, LENGTH), generator=g)
        self.x[:, :2] = 2 + self.y[:, None]
        self.labelled = torch.rand(size, generator=g) < share

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i], "labelled": self.labelled[i]}


class MeanTeacherTrainer(Trainer):
    def __init__(self, *args, weight=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.weight = weight

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        student = model(input_ids=inputs["input_ids"])
        if not model.training:
            loss = F.cross_entropy(student.logits, inputs["labels"])
            return (loss, {"logits": student.logits}) if return_outputs else loss
        known = inputs["labelled"].float()
        each = F.cross_entropy(student.logits, inputs["labels"], reduction="none")
        total = self.accelerator.reduce(known.sum(), reduction="sum").clamp(min=1)
        supervised = (each * known).sum() * self.args.world_size / total
        with torch.no_grad():
            target = self.teacher(input_ids=inputs["input_ids"]).logits.softmax(-1)
        consistency = F.mse_loss(student.logits.softmax(-1), target)
        return supervised + self.weight * consistency


class MovingAverage(TrainerCallback):
    def __init__(self, teacher, decay=0.9):
        self.teacher, self.decay = teacher, decay

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs):
        for slow, fast in zip(self.teacher.parameters(), model.parameters()):
            slow.lerp_(fast, 1 - self.decay)


def accuracy(pred):
    return {"accuracy": float(np.mean(pred.predictions.argmax(-1) == pred.label_ids))}


def main():
    set_seed(9)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=CLASSES,
    )
    args = TrainingArguments(
        output_dir="teacher", use_cpu=True, num_train_epochs=3, per_device_train_batch_size=16,
        per_device_eval_batch_size=32, learning_rate=2e-3, logging_steps=8, save_strategy="no",
        report_to="none", disable_tqdm=True, remove_unused_columns=False, label_names=["labels"],
    )
    trainer = MeanTeacherTrainer(
        model=BertForSequenceClassification(config), args=args, train_dataset=Pages(512, 0, 0.3),
        eval_dataset=Pages(128, 1, 1.0), compute_metrics=accuracy,
    )
    trainer.add_callback(MovingAverage(trainer.teacher))
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"accuracy {metrics['eval_accuracy']:.3f}")
        torch.save(trainer.teacher.state_dict(), "teacher.pt")


if __name__ == "__main__":
    main()
