"""Modules that `torch.compile` has wrapped, and losses with parameters, in code for other trainers."""

import pytest
import torch
from torch import nn

pytest.importorskip("pytorch_lightning")
pytest.importorskip("transformers")

from lockstep.core.errors import TrainingError
from lockstep_recipes import adapters
from packages.recipes.tests.adapters import lightning_cases, test_lightning, test_transformers
from tests import runs

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def fit_lightning(module, folder):
    task = adapters.lightning(module, lightning_cases.Data(), trainer=test_lightning.TRAINER)
    return runs.fit(task, test_lightning.settings(train={"steps": 4}), folder)[0]


def lightning_net():
    torch.manual_seed(3)
    return lightning_cases.Net()


def test_a_compiled_lightning_module_has_plain_names(tmp_path):
    expected = fit_lightning(lightning_net(), tmp_path / "plain")
    weights = fit_lightning(torch.compile(lightning_net(), backend="aot_eager"), tmp_path / "compiled")
    assert list(weights) == list(expected)
    assert runs.difference(weights, expected) < 1e-12


def test_a_compiled_transformers_model_has_plain_names(tmp_path):
    expected, _ = test_transformers.fit(tmp_path / "plain", steps=4)
    net = torch.compile(test_transformers.model(), backend="aot_eager")
    weights, _ = test_transformers.fit(tmp_path / "compiled", steps=4, net=net)
    assert list(weights) == list(expected)
    assert test_transformers.difference(weights, expected) < 1e-12


def test_layers_in_a_list_of_a_lightning_module_are_refused(tmp_path):
    class Listed(lightning_cases.Net):
        def __init__(self):
            super().__init__()
            self.heads = [nn.Linear(3, 3).double()]  # not an nn.ModuleList

        def forward(self, inputs):
            return self.heads[0](super().forward(inputs))

    with pytest.raises(TrainingError, match=r"heads\[0\].weight, .*heads\[0\].bias get a gradient"):
        fit_lightning(Listed(), tmp_path / "run")
