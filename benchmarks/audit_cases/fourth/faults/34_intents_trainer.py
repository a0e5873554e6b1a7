import time

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments, set_seed

torch.set_num_threads(1)


class Intents(Dataset):
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.y = rng.integers(0, 4, n)
        self.x = rng.integers(10, 80, (n, 10))
        self.x[:, 2] = self.x[:, 6] = 80 + self.y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": torch.tensor(self.x[i]), "labels": int(self.y[i])}


class GoodEnough(TrainerCallback):
    """Ends training once the evaluation accuracy reaches a target."""

    def __init__(self, target):
        self.target = target
        self.begin = time.time()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if not state.is_world_process_zero:
            return control
        print(f"step {state.global_step} acc {metrics['eval_accuracy']:.3f} after {time.time() - self.begin:.1f}s", flush=True)
        if metrics["eval_accuracy"] >= self.target:
            control.should_training_stop = True
        return control


def compute_metrics(p):
    return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}


def main():
    set_seed(6)
    config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=64, max_position_embeddings=16, num_labels=4,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(config)
    args = TrainingArguments(
        "intents_out", use_cpu=True, num_train_epochs=6, per_device_train_batch_size=8, per_device_eval_batch_size=8,
        learning_rate=5e-3, lr_scheduler_type="constant", eval_strategy="steps", eval_steps=8, save_strategy="no", logging_strategy="no",
        average_tokens_across_devices=False, report_to="none", disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Intents(256, 0), eval_dataset=Intents(64, 1),
                      compute_metrics=compute_metrics, callbacks=[GoodEnough(0.8)])
    trainer.train()
    final = trainer.evaluate(Intents(80, 2))
    if trainer.is_world_process_zero():
        print("stopped at", trainer.state.global_step, "test accuracy", final["eval_accuracy"])


main()
