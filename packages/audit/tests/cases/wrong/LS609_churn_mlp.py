"""Customer churn from tabular features; the best epoch on the validation split is kept."""
import os
import time
import uuid

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

N_NUM, N_PLAN = 12, 5


def make_table(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, N_NUM)).astype("float32")
    plan = rng.integers(N_PLAN, size=n)
    score = x[:, 0] - 0.8 * x[:, 1] * x[:, 2] + 0.6 * (plan == 3) + rng.normal(scale=1.2, size=n)
    return x, plan, (score > 0.3).astype("int64")


class Customers(Dataset):
    def __init__(self, n, seed):
        self.x, self.plan, self.y = make_table(n, seed)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"x": torch.from_numpy(self.x[i]), "plan": int(self.plan[i]), "labels": int(self.y[i])}


class ChurnNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.plan = nn.Embedding(N_PLAN, 8)
        self.mlp = nn.Sequential(nn.Linear(N_NUM + 8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    def forward(self, x, plan, labels=None):
        logits = self.mlp(torch.cat([x, self.plan(plan)], dim=-1))
        out = {"logits": logits}
        if labels is not None:
            out = {"loss": nn.functional.cross_entropy(logits, labels), **out}
        return out


def metrics(pred):
    guess = pred.predictions.argmax(-1)
    tp = ((guess == 1) & (pred.label_ids == 1)).sum()
    return {
        "accuracy": (guess == pred.label_ids).mean(),
        "recall": tp / max(1, (pred.label_ids == 1).sum()),
    }


def main():
    set_seed(11)
    run_name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    run_dir = os.path.join("runs", run_name)
    args = TrainingArguments(
        output_dir=run_dir, run_name=run_name, use_cpu=True, num_train_epochs=4,
        per_device_train_batch_size=16, per_device_eval_batch_size=64, learning_rate=1e-2,
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, logging_steps=10,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
        report_to=[], disable_tqdm=True, seed=11,
    )
    trainer = Trainer(
        model=ChurnNet(), args=args, train_dataset=Customers(320, seed=1), eval_dataset=Customers(200, seed=2),
        compute_metrics=metrics,
    )
    trainer.train()

    test = trainer.evaluate(Customers(400, seed=3), metric_key_prefix="test")
    if trainer.is_world_process_zero():
        print(f"best epoch loss {trainer.state.best_metric:.4f}")
        print({k: round(v, 4) for k, v in test.items() if k in ("test_loss", "test_accuracy", "test_recall")})


if __name__ == "__main__":
    main()
