"""Your own task: `lockstep train examples/digits_task.py:Digits --nproc 2 train.epochs=5`."""

from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Task
from lockstep_recipes.recipes.digits import Digits as DigitImages


class Digits(Task):
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def train_data(self):
        return DigitImages(training=True)

    def eval_data(self):
        return DigitImages(training=False)

    def prepare(self, sample, epoch, training):
        return sample[0] / 255, sample[1]

    def loss(self, model, batch):
        return cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def predict(self, model, batch):
        return model(batch[0])

    def metrics(self):
        return MetricCollection({"accuracy": MulticlassAccuracy(10, average="micro")})
