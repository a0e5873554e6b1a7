"""From a task's model to one that can be trained."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lockstep.core.errors import TrainingError, UsageError
from lockstep.core.optim import OptimConfig, build_optimizer
from tests import own_tasks, runs


def test_gradients_that_a_task_left_on_its_model_do_not_count():
    class Pretrained(own_tasks.Plain):
        def model(self):
            model = super().model()
            self.loss(model, self.train_data()[:10]).backward()
            return model

    left, _ = runs.fit(Pretrained(), runs.config())
    expected, _ = runs.by_hand(own_tasks.Plain())
    assert runs.difference(left, expected) < 1e-10
    assert all(torch.isfinite(tensor).all() for tensor in left.values())


def with_table(change):
    """A task whose model looks up a table of weights, after `change(model)`, by `functional.embedding`."""

    class Lookup(own_tasks.Plain):
        def model(self):
            model = nn.Module()
            model.table = nn.Parameter(torch.randn(20, 4))
            model.is_sparse = False
            change(model)
            return model

        def loss(self, model, batch):
            rows = torch.zeros(len(batch[0]), dtype=torch.long)
            return functional.embedding(rows, model.table, sparse=model.is_sparse).square().sum()

        def predict(self, model, batch):
            return batch[0]

    return Lookup()


SPARSE = {
    "buffer": lambda model: model.register_buffer("adjacent", torch.eye(4).to_sparse()),
    "buffer that is not saved": lambda model: model.register_buffer("adjacent", torch.eye(4).to_sparse_coo(), False),
    "parameter": lambda model: setattr(model, "adjacent", nn.Parameter(torch.eye(4).to_sparse())),
}


@pytest.mark.parametrize("change", SPARSE.values(), ids=list(SPARSE))
def test_a_sparse_tensor_of_a_model_is_named_before_anything_else(change):
    with pytest.raises(TrainingError, match=r"adjacent \(sparse_coo\): a model needs dense tensors") as caught:
        runs.fit(with_table(change), runs.config())
    assert "torch.sparse_coo_tensor" in caught.value.remedy


@pytest.mark.filterwarnings("ignore:.*torch.jit.* deprecated:DeprecationWarning")
def test_a_module_of_torchscript_is_named():
    whole = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5)).double()

    class Scripted(own_tasks.Plain):
        def model(self):
            return self.made

    for made, name in {
        torch.jit.script(whole): "the model",
        torch.jit.trace(whole, torch.zeros(2, 10, dtype=torch.float64)): "the model",
        nn.Sequential(whole[0], torch.jit.script(whole[1])): "1",
    }.items():
        task = Scripted()
        task.made = made
        with pytest.raises(TrainingError, match=f"{name} is a module of TorchScript") as caught:
            runs.fit(task, runs.config())
        assert "compute.compile=model" in caught.value.remedy


def test_a_sparse_gradient_of_a_function_is_named_before_the_first_update():
    with pytest.raises(TrainingError, match="table would have sparse gradients") as caught:
        runs.fit(with_table(lambda model: setattr(model, "is_sparse", True)), runs.config())
    assert "sparse=False" in caught.value.remedy


@pytest.mark.parametrize(("name", "why"), [("LBFGS", "by a closure"), ("SparseAdam", "gradients are dense here")])
def test_an_optimizer_that_cannot_train_here_says_why(name, why):
    with pytest.raises(UsageError, match=f"{name} cannot train here: .*{why}") as caught:
        build_optimizer(nn.Linear(2, 2), OptimConfig(name=name))
    assert "AdamW" in caught.value.remedy
