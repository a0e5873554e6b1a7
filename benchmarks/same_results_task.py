"""A task and a Part as users write them. For `same_results.py`: they import only names of the package itself."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Metrics, Part, Task


class Points(Dataset):
    """Noisy points of three classes with an answer that is often missing. Every ninth sample can be `broken`."""

    def __init__(self, length, seed, broken=False):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (length,), generator=generator)
        self.inputs = torch.randn(length, 10, generator=generator) + self.labels[:, None]
        self.answers = self.inputs[:, :2].tanh()
        self.known = torch.rand(length, 2, generator=generator) < torch.rand(length, 1, generator=generator) ** 2
        self.lengths = [1 + number * 5 % 7 for number in range(length)]
        self.broken = broken

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        if self.broken and index % 9 == 4:
            raise OSError("truncated file")
        return self.inputs[index], self.labels[index], self.answers[index], self.known[index]


class Block(nn.Module):
    """A residual block. 7 features: no number of ranks divides them."""

    def __init__(self, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 9), nn.Linear(9, 7, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden):
        return hidden + self.drop(self.down(self.up(self.norm(hidden)).tanh()))


class TwoHeads(nn.Module):
    """Blocks below a classifier and an estimator."""

    def __init__(self, dropout, batch_norm):
        super().__init__()
        self.inner = nn.Linear(10, 7)
        self.norm = nn.BatchNorm1d(7) if batch_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.classes, self.answers = nn.Linear(7, 3), nn.Linear(7, 2)

    def forward(self, inputs):
        hidden = self.norm(self.inner(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return self.classes(hidden), self.answers(hidden)


class Heads(Task):
    """Two losses with their own units, noise in `prepare`, and metrics of training and evaluation."""

    coefficients = {"answers": 3.0}  # noqa: RUF012

    def __init__(self, length=100, dropout=0.0, batch_norm=False, broken=False):
        self.length, self.dropout, self.batch_norm, self.broken = length, dropout, batch_norm, broken

    def model(self):
        return TwoHeads(self.dropout, self.batch_norm)

    def train_data(self):
        return Points(self.length, 1, self.broken)

    def eval_data(self):
        return Points(29, 2, self.broken)

    def prepare(self, sample, epoch, training):
        return (sample[0] + 0.1 * torch.randn(10), *sample[1:]) if training else sample

    def weight(self, batch):
        return {"classes": float(len(batch[0])), "answers": batch[3].sum()}

    def loss(self, model, batch):
        inputs, labels, answers, known = batch
        classes, estimates = model(inputs)
        of_answers = ((estimates - answers).square() * known).sum()
        losses = {"classes": functional.cross_entropy(classes, labels, reduction="sum"), "answers": of_answers}
        return losses, classes.detach()

    def predict(self, model, batch):
        return model(batch[0])[0]

    def metrics(self):
        return Metrics({"accuracy": MulticlassAccuracy(3)})


class Halves(Part):
    """Halves the gradients, counts the steps across kills, and logs both."""

    def __init__(self):
        self.steps = 0

    def before_update(self, training):
        for gradient in training.gradients().values():
            gradient.mul_(0.5)

    def after_step(self, training):
        self.steps += 1

    def log_entry(self, training):
        training.log("own/steps", self.steps)
        training.log("own/ranks", training.all_sum([1.0])[0])

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Ends(Part):
    """Ends the training at the first evaluation."""

    def after_evaluation(self, training):
        training.tell(f"the accuracy is known at step {training.step}")
        training.request_stop("the first evaluation is enough")
