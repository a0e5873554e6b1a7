"""Image and text towers: `lockstep train examples/towers_task.py:Towers --nproc 2 batch.global=128 train.epochs=6`.

The loss of CLIP compares each image of the global batch with each caption. It needs all of them, so `embed` returns the
embeddings of a micro-batch, and `loss` receives those of the whole global batch, on any number of ranks.
"""

import torch
from torch import nn
from torch.nn.functional import kl_div, normalize
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Metrics, Task
from lockstep_recipes.recipes.digits import Digits

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
CAPTIONS = torch.tensor([list(f"the digit {word}".ljust(16).encode()) for word in WORDS])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 32))
        self.letters = nn.Embedding(128, 32)
        self.text = nn.Sequential(nn.Conv1d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten())
        self.to_text = nn.Linear(64, 32)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def captions(self, letters):
        return normalize(self.to_text(self.text(self.letters(letters).transpose(1, 2))), dim=1)


class Towers(Task):
    def model(self):
        return Model()

    def train_data(self):
        return Digits(training=True)

    def eval_data(self):
        return Digits(training=False)

    def prepare(self, sample, epoch, training):
        return sample[0] / 255, CAPTIONS[sample[1]], sample[1]

    def embed(self, model, batch):
        pictures, captions, digits = batch
        return normalize(model.image(pictures), dim=1), model.captions(captions), digits

    def loss(self, model, embedded):  # of all samples of the global batch
        pictures, captions, digits = embedded
        scores = model.scale.exp() * pictures @ captions.T
        same = (digits[:, None] == digits).to(scores.dtype)  # several images have the same caption
        target = same / same.sum(dim=1)
        by_picture = kl_div(scores.log_softmax(dim=1), target, reduction="sum")
        return (by_picture + kl_div(scores.T.log_softmax(dim=1), target, reduction="sum")) / 2

    def predict(self, model, batch):  # which caption is nearest to an image
        return normalize(model.image(batch[0]), dim=1) @ model.captions(CAPTIONS.to(batch[0].device)).T

    def metrics(self):
        return Metrics(
            {"accuracy": MulticlassAccuracy(10, average="micro")}, lambda m, output, batch: m.update(output, batch[2])
        )
