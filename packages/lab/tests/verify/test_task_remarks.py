"""What a task gives when it is asked twice, whether gradients are derivatives, and which units a weight counts."""

import itertools
import os

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lockstep_lab.verify.derivative import own_backwards, wrong_derivative
from lockstep_lab.verify.repetition import depends_on_rank, differs, model_difference
from lockstep_lab.verify.zero_outputs import other_units
from packages.lab.tests.verify.broken_tasks import Doubled, PaddingCounted, Tokens

CPU = torch.device("cpu")


def loss_of(model):
    return model(torch.arange(12.0).view(3, 4)).cos().sum()


def made(change=lambda model, number: None):
    """How two models differ, each of which `change` changes in its own way."""
    numbers = itertools.count()

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
        change(model, next(numbers))
        return model

    return model_difference(make, make(), loss_of)


def test_models_under_one_seed_are_the_same():
    assert made() == ""


def test_a_counter_that_changes_no_loss_is_no_difference():
    assert made(lambda model, number: setattr(model, "number", number)) == ""


def test_weights_that_differ_are_named():
    found = made(lambda model, number: nn.init.constant_(model[0].bias, number))
    assert found.startswith("the initial weights differ between two models")
    assert "first in 0.bias" in found


def test_a_number_that_changes_the_loss_is_named():
    assert made(lambda model, number: setattr(model[1], "eps", 0.1 + number)).startswith("1.eps is 0.1 in one model")


def test_a_mode_that_differs_is_named():
    assert made(lambda model, number: model[1].train(number > 0)).startswith("1.training is False in one model")


def test_a_loss_that_differs_with_the_same_seed_is_found():
    numbers = itertools.count(1)
    assert differs(lambda model, batch: torch.rand(3), nn.Identity(), None) == ""
    assert differs(lambda model, batch: torch.tensor(float(next(numbers))), nn.Identity(), None) == "1 and 2"


def test_buffers_that_each_forward_pass_moves_are_no_difference():
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).double()
    inputs = torch.randn(5, 4, dtype=torch.float64)
    before = [buffer.clone() for buffer in model.buffers()]
    assert differs(lambda model, batch: model(batch).square().sum(), model, inputs) == ""
    assert all(map(torch.equal, model.buffers(), before))


def test_a_loss_that_reads_its_rank_is_found():
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def loss(model, batch):
        second = model[1](batch).sum() if os.environ["RANK"] == "0" else 0.0
        return model[0](batch).sum() + second

    before = os.environ.get("RANK")
    assert depends_on_rank(lambda model, batch: model[0](batch).sum(), model, torch.ones(3, 4)) == ""
    found = depends_on_rank(loss, model, torch.ones(3, 4))
    assert " and " in found
    assert found.endswith("; 1.bias is unused only on rank 1")
    assert os.environ.get("RANK") == before


class Network(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
        self.activation = activation

    def forward(self, inputs):
        return self.layers[1](self.activation(self.layers[0](inputs)))


@pytest.mark.parametrize(
    ("activation", "wrong"),
    # Behind detach(), parameters get no gradient at all, which another check says.
    [(torch.tanh, False), (torch.relu, False), (Doubled.apply, True), (torch.Tensor.detach, False)],
)
def test_a_gradient_is_compared_with_differences(activation, wrong):
    torch.manual_seed(0)
    model, batch = Network(activation), torch.randn(6, 4, dtype=torch.float64)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = wrong_derivative(lambda model, batch: functional.mse_loss(model(batch), batch[:, :3]), model, batch)
    assert bool(found) == wrong
    assert all(map(torch.equal, model.parameters(), before))


class Halved(torch.autograd.Function):
    """tanh with a backward pass that forgets a factor where `right` is not set."""

    @staticmethod
    def forward(context, inputs, right):
        context.save_for_backward(inputs.tanh())
        context.right = right
        return inputs.tanh()

    @staticmethod
    def backward(context, gradient):
        (outputs,) = context.saved_tensors
        return (1.0 if context.right else 0.5) * gradient * (1 - outputs.square()), None


class Residual(nn.Module):
    """A small branch has a backward pass of its own."""

    def __init__(self, right):
        super().__init__()
        self.first, self.branch, self.last = (nn.Linear(4, 4).double() for _ in range(3))
        self.right = right

    def forward(self, inputs):
        hidden = self.first(inputs).relu()
        return self.last(hidden + 0.05 * Halved.apply(self.branch(hidden), self.right))


@pytest.mark.parametrize("right", [True, False])
def test_a_backward_pass_that_forgets_a_factor_is_found_in_a_small_branch(right):
    torch.manual_seed(0)
    model, batch = Residual(right), torch.randn(6, 4, dtype=torch.float64)

    def call(model, batch):
        return functional.mse_loss(model(batch), batch.flip(0), reduction="sum")

    (name,) = own_backwards(call(model, batch))
    assert name.startswith("Halved (test_task_remarks.py:")
    found = wrong_derivative(call, model, batch)
    assert (f"Only parameters below {name} were moved" in found) != right
    assert bool(found) != right
    inputs = batch.clone().requires_grad_()  # torch itself has such classes, too
    assert own_backwards(checkpoint(model.first, inputs, use_reentrant=True).sum()) == {}


def units_of(task):
    torch.manual_seed(0)
    samples = [task.train_data()[index] for index in range(8)]
    return other_units(task, task.model(), samples, CPU)


class SamplesCounted(Tokens):
    """All sequences are whole, and the mean is over sequences."""

    def train_data(self):
        return [
            (inputs, labels.clamp(min=0))
            for inputs, labels in (super(SamplesCounted, self).train_data()[n] for n in range(8))
        ]

    def weight(self, batch):
        return torch.tensor(float(len(batch[0])))


def test_a_weight_that_counts_other_units_than_the_loss_adds_is_said():
    assert "Task.weight counts" in units_of(PaddingCounted())


@pytest.mark.parametrize("task", [Tokens, SamplesCounted])
def test_a_weight_in_a_fixed_ratio_to_the_terms_of_the_loss_is_right(task):
    assert units_of(task()) == ""
