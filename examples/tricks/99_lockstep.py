"""All tricks together, in Lockstep: the training of 98_all_by_hand.py.

    torchrun --nproc-per-node 2 examples/tricks/99_lockstep.py

It saves into runs/tricks. Stop it and start it again: it resumes.
"""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

import lockstep
from lockstep_recipes.recipes.digits import Digits as Data


class Digits(lockstep.Task):
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def train_data(self):
        return Data(training=True)

    def eval_data(self):
        return Data(training=False)

    def prepare(self, sample, epoch, training):
        image, label = sample[0] / 255, sample[1]
        return image + 0.05 * torch.randn(image.shape) if training else image, label

    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def predict(self, model, batch):
        return model(batch[0])

    def metrics(self):
        return {"accuracy": MulticlassAccuracy(10, average="micro")}


CONFIG = {
    "name": "tricks",
    "batch": {"global": 64, "micro": 16},
    "train": {"epochs": 6, "eval_every_epochs": 1},
    "optim": {"name": "SGD", "lr": 0.1, "lr_scaling": "linear", "reference_batch": 32, "clip_norm": 1.0},
    "schedule": {"warmup_steps": 10},
    "precision": "fp16",
    "checkpoint": {"every_steps": 50},
}

if __name__ == "__main__":
    results = lockstep.Trainer(CONFIG, quiet=True).fit(Digits())
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"loss {results['train/loss']:.4f}, accuracy {results['eval/accuracy']:.4f}")
