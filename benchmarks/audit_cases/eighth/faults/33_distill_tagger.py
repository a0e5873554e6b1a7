"""Distil a larger sequence classifier into a small one (tiny BERTs from configs, synthetic token data)."""
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

VOCAB, SEQ, CLASSES = 120, 16, 4


class TokenCounts(Dataset):
    """The class is the token range that occurs most often."""

    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, CLASSES, n)
        ids = rng.integers(1, VOCAB, (n, SEQ))
        width = VOCAB // CLASSES
        for i, y in enumerate(self.labels):
            pos = rng.choice(SEQ, 7, replace=False)
            ids[i, pos] = rng.integers(max(1, y * width), (y + 1) * width, 7)
        self.ids = torch.from_numpy(ids)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": int(self.labels[i])}


def bert(hidden, layers):
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=2,
            intermediate_size=2 * hidden, max_position_embeddings=SEQ, num_labels=CLASSES,
        )
    )


class DistillTrainer(Trainer):
    def __init__(self, *args, teacher, temperature=2.0, alpha=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval().requires_grad_(False)
        self.temperature = temperature
        self.alpha = alpha

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = self.model(**inputs)
        with torch.no_grad():
            target = self.teacher(input_ids=inputs["input_ids"]).logits
        t = self.temperature
        kd = F.kl_div(
            F.log_softmax(outputs.logits / t, dim=-1),
            F.softmax(target / t, dim=-1),
            reduction="batchmean",
        ) * t * t
        loss = self.alpha * outputs.loss + (1 - self.alpha) * kd
        return (loss, outputs) if return_outputs else loss


def accuracy(pred):
    logits = pred.predictions[0] if isinstance(pred.predictions, tuple) else pred.predictions
    return {"accuracy": float((logits.argmax(-1) == pred.label_ids).mean())}


def run_args(name, lr, epochs):
    return TrainingArguments(
        output_dir=f"runs/{name}", use_cpu=True, num_train_epochs=epochs, learning_rate=lr,
        per_device_train_batch_size=16, per_device_eval_batch_size=32, logging_steps=10,
        average_tokens_across_devices=False,
        save_strategy="no", report_to="none", dataloader_pin_memory=False, seed=5,
    )


def main():
    set_seed(5)
    train, test = TokenCounts(512, 1), TokenCounts(128, 2)
    teacher_trainer = Trainer(bert(48, 2), run_args("teacher", 2e-3, 2), train_dataset=train)
    teacher_trainer.train()

    trainer = DistillTrainer(
        model=bert(24, 1),
        args=run_args("student", 3e-3, 3),
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
        teacher=teacher_trainer.model,
    )
    trainer.train()
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("student accuracy", round(scores["eval_accuracy"], 3))


if __name__ == "__main__":
    main()
