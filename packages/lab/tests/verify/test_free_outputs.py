"""The best that outputs can be: constant ones, and any at all."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Task
from lockstep.core.errors import UsageError
from lockstep_lab.verify import free_outputs
from lockstep_lab.verify.comparable_task import ComparableTask, TaskChanges
from lockstep_lab.verify.constant_baseline import constant_baseline
from lockstep_lab.verify.free_outputs import FreeOutputs, fit_outputs, least_loss
from packages.lab.tests.verify import odd_tasks, unusual_kinds
from tests import lm_cases, own_tasks, runs
from tests.selection import mainly

HERE = Path(__file__).resolve().parent
CPU = torch.device("cpu")


def settings(name, file=HERE / "odd_tasks.py", **options):
    return runs.config(task={"kind": f"{file}:{name}"} | options)


def fitted(task, constant=True):
    torch.manual_seed(0)
    outputs = FreeOutputs(task.model().eval(), constant=constant)
    _, loss = fit_outputs(task, outputs, CPU)
    return loss, [parameter.detach() for parameter in outputs.outputs]


def test_the_best_constant_of_cross_entropy_is_the_frequency_of_each_class():
    loss, (logits,) = fitted(odd_tasks.Classes())
    frequencies = torch.tensor([20, 12, 8]) / 40
    torch.testing.assert_close(logits.softmax(0), frequencies, atol=1e-4, rtol=0)
    assert loss == pytest.approx(-float((frequencies * frequencies.log()).sum()), abs=1e-6)


@pytest.mark.parametrize("packing", mainly([True], [True, False]))
def test_the_best_constant_of_a_language_model_is_the_frequency_of_each_token(tmp_path, packing):
    """Also where rows have different lengths, and while the evaluation writes texts."""
    options = {"packing": packing, "eval_fraction": 0.3, "new_tokens": 4, "exact_match": 0}
    task = lm_cases.small_task(lm_cases.corpus(tmp_path), **options)
    model = task.model().eval()
    outputs = FreeOutputs(model, constant=True)
    _, loss = fit_outputs(task, outputs, CPU)
    data = task.train_data()
    targets = torch.cat([torch.from_numpy(data[index].targets) for index in range(len(data))])
    frequencies = targets.bincount(minlength=len(task.tokenizer)) / len(targets)
    (logits,) = outputs.outputs
    torch.testing.assert_close(logits[0].softmax(0), frequencies, atol=2e-3, rtol=0)
    assert loss == pytest.approx(-float(frequencies.xlogy(frequencies).sum()), abs=2e-3)
    evaluated = task.eval_data()
    batch = task.collate([evaluated[0], evaluated[1]])
    assert int(batch["prompts"][0]) == 3
    assert torch.equal(task.predict(outputs, batch)["written"], task.predict(model, batch)["written"])


def test_outputs_of_tokens_whose_loss_is_no_cross_entropy_are_fitted_from_zero():
    class Squares(Task):
        def model(self):
            return nn.Embedding(5, 3)

        def train_data(self):
            draw = torch.Generator().manual_seed(0)
            return TensorDataset(torch.randint(5, (20, 4), generator=draw), torch.randn(20, 4, 3, generator=draw))

        def loss(self, model, batch):
            return (model(batch[0]) - batch[1]).square().sum()

    _, (means,) = fitted(Squares())
    torch.testing.assert_close(means, Squares().train_data().tensors[1].mean((0, 1))[None], atol=1e-4, rtol=0)


def test_outputs_that_are_too_large_are_not_fitted(monkeypatch):
    monkeypatch.setattr(free_outputs, "_MOST_NUMBERS", 2)
    with pytest.raises(UsageError, match="the model's outputs have more than 2 numbers"):
        fitted(odd_tasks.Classes())


def test_the_best_constant_of_squared_error_is_the_mean():
    task = odd_tasks.Small()
    loss, (outputs,) = fitted(task)
    targets = task.train_data().tensors[1]
    torch.testing.assert_close(outputs, targets.mean(0), atol=1e-4, rtol=0)
    assert loss == pytest.approx(float((targets - targets.mean(0)).square().sum()) / 40, rel=1e-6)


def test_large_targets_have_their_mean_too():
    task = odd_tasks.LargeTargets()
    loss, (outputs,) = fitted(task)
    targets = task.train_data().tensors[1].double()
    assert (outputs - targets.mean(0)).abs().max() < 10.0  # of a spread of 1000
    assert loss == pytest.approx(float((targets - targets.mean(0)).square().sum()) / 40, rel=1e-3)


def test_the_best_constant_of_masked_heads_is_the_mean_of_each_heads_labels():
    task = odd_tasks.MaskedHeads()
    loss, (outputs,) = fitted(task)
    _, targets, valid = task.train_data().tensors
    means = (targets * valid).sum(0)[:2] / valid.sum(0)[:2]
    torch.testing.assert_close(outputs[:2], means, atol=1e-3, rtol=0)
    rest = ((targets[:, :2] - means).square() * valid[:, :2]).sum(0) / valid.sum(0)[:2]
    assert loss == pytest.approx(float(rest[0] + 2 * rest[1]), rel=1e-4)
    assert float(outputs[2]) == 0.0  # no label says what it should be


def test_a_constant_is_fitted_to_labels_and_not_to_inputs():
    task = odd_tasks.Classes()
    model = task.model()
    before = [parameter.clone() for parameter in model.parameters()]
    outputs = FreeOutputs(model, constant=True)
    fit_outputs(task, outputs, CPU)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_outputs_of_their_own_for_each_sample_leave_no_loss():
    loss, (outputs,) = fitted(ComparableTask(odd_tasks.Small(), TaskChanges(train_samples=8)), constant=False)
    assert outputs.shape == (8, 2)
    assert loss < 1e-8


def test_the_least_loss_under_label_smoothing_is_its_entropy():
    found = least_loss(settings("Smoothed"), TaskChanges(train_samples=8))
    right, wrong = 0.9 + 0.1 / 3, 0.1 / 3
    assert found == pytest.approx(-(right * math.log(right) + 2 * wrong * math.log(wrong)), rel=1e-3)
    assert least_loss(settings("Classes"), TaskChanges(train_samples=8)) < 0.01


def test_the_least_loss_is_zero_where_it_cannot_be_found():
    for name in ("AroundTheOutput", "OutputIgnored", "Raises"):
        assert least_loss(settings(name), TaskChanges(train_samples=8)) == 0.0


def test_an_output_of_changing_shape_has_no_constant():
    with pytest.raises(UsageError, match="changes with its input"):
        fitted(odd_tasks.OtherShapes())
    assert "changes with its input" in constant_baseline(settings("OtherShapes"), 512).obstacle


def test_a_loss_that_does_not_come_from_the_output_has_no_constant():
    with pytest.raises(UsageError, match="does not come from tensors that the model returns"):
        fitted(odd_tasks.AroundTheOutput())
    with pytest.raises(UsageError, match="does not come from tensors that the model returns"):
        fitted(odd_tasks.OutputIgnored())


def test_what_a_loss_asks_of_the_model_is_the_models():
    model = own_tasks.DeepModel(1, 0.0)
    outputs = FreeOutputs(model, constant=True)
    assert outputs.factors is model.factors
    assert list(outputs.parameters()) == list(model.parameters())
    assert outputs.scaled(torch.ones(5)).shape == (5,)
    with pytest.raises(AttributeError):
        _ = outputs.nothing_of_that_name


def test_outputs_in_dicts_and_integers_beside_them_keep_their_form():
    class Several(nn.Module):
        def forward(self, inputs):
            return {"a": inputs.double(), "b": (inputs[:, :1], inputs.argmax(1), inputs.sum())}

    outputs = FreeOutputs(Several(), constant=True)
    found = outputs(torch.randn(4, 3))
    assert found["a"].shape == (4, 3)
    assert found["a"].dtype == torch.float64
    assert found["b"][0].shape == (4, 1)
    assert found["b"][1].dtype == torch.int64
    assert [tuple(one.shape) for one in outputs.outputs] == [(3,), (1,)]
    assert found["a"].requires_grad
    outputs(torch.randn(2, 3))
    assert len(outputs.outputs) == 2


# ---- the best constant output


def test_the_best_constant_is_evaluated_on_other_data():
    found = constant_baseline(settings("Classes"), 512)
    assert found.obstacle == ""
    frequencies = torch.tensor([20, 12, 8]) / 40
    assert found.values["loss"] == pytest.approx(
        -float((torch.tensor([3, 3, 9]) / 15 * frequencies.log()).sum()), abs=1e-3
    )
    # The loss is least for the class that is most frequent in training; the answer that is right most often is another.
    assert found.values["accuracy"] == pytest.approx(9 / 15)
    assert found.units == 15
    assert found.chance("accuracy") == pytest.approx(2.6 * (0.6 * 0.4 / 15) ** 0.5)
    assert found.is_beaten("accuracy", 0.95)
    assert not found.is_beaten("accuracy", 0.9)
    assert found.values["samples"] == 15
    assert found.comparable_metrics == ["accuracy"]
    assert found.is_better("accuracy", 0.6, 0.5)
    assert not found.is_better("accuracy", 0.5, 0.5)
    assert set(found.untrained) == {"loss", "accuracy", "samples", "bad"}
    assert not found.no_data
    assert not found.no_predict


def test_metrics_may_come_in_a_dict_and_methods_may_be_set_on_the_object():
    found, expected = (constant_baseline(settings(name), 512) for name in ("MetricsInADict", "Classes"))
    assert found.values == expected.values
    assert found.comparable_metrics == ["accuracy"]
    assert not constant_baseline(settings("PredictsOnTheObject"), 64).no_predict


def test_a_constant_is_fitted_to_a_part_of_the_data():
    whole, part = constant_baseline(settings("Classes"), 512), constant_baseline(settings("Classes"), 3)
    assert whole.values["loss"] != part.values["loss"]


def test_where_there_is_no_constant_it_says_why():
    found = constant_baseline(settings("AroundTheOutput"), 512)
    assert "does not come from tensors that the model returns" in found.obstacle
    assert found.untrained
    assert not found.values


def test_without_evaluation_data_or_predictions_it_says_so():
    found = constant_baseline(settings("NoEvaluation", HERE / "clean_tasks.py"), 64)
    assert found.no_data
    assert "no evaluation data" in found.obstacle
    assert constant_baseline(settings("NoPredictions"), 64).no_predict


class _Maps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(1, 3, 1)

    def forward(self, images):
        return self.layer(images)


def test_a_constant_map_has_a_number_for_each_channel_at_any_size():
    outputs = FreeOutputs(_Maps(), constant=True)
    for height, width in ((4, 6), (5, 3)):
        assert outputs(torch.zeros(2, 1, height, width)).shape == (2, 3, height, width)
    assert [tuple(parameter.shape) for parameter in outputs.outputs] == [(3, 1, 1)]


def test_targets_that_a_frozen_teacher_makes_stay_as_they_are():
    task = unusual_kinds.Distilled()
    loss, (constant,) = fitted(task)
    torch.manual_seed(0)
    taught = task.model().eval()(task.train_data().tensors[0])[1]
    torch.testing.assert_close(constant, taught.mean(dim=0), atol=1e-3, rtol=0)
    assert loss == pytest.approx(float((taught - taught.mean(dim=0)).square().sum(dim=1).mean()), rel=1e-4)
