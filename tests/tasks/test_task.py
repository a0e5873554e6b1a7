"""The contract of a task: names of earlier versions are refused, and the loss may come with its output."""

import pytest
import torch

from lockstep import Metrics, Presenter, Task, Trainer
from lockstep.engine import task_checks
from lockstep.errors import UsageError
from lockstep.tasks import task as contract
from tests import own_tasks, runs

METHODS = {
    "setup",
    "model",
    "train_data",
    "eval_data",
    "prepare",
    "collate",
    "weight",
    "loss",
    "predict",
    "metrics",
}


def test_a_task_has_ten_methods_and_two_attributes():
    names = {name for name in vars(Task) if not name.startswith("_")}
    assert {name for name in names if callable(vars(Task)[name]) and name != "presenter"} == METHODS
    assert names - METHODS == {"coefficients", "presenter"}


@pytest.mark.parametrize("name", contract._OLD_NAMES)
def test_a_method_that_is_no_longer_called_is_refused_with_its_new_place(name):
    with pytest.raises(UsageError, match=f"Mine.{name}: Lockstep does not call this method of a task") as caught:
        type("Mine", (own_tasks.Plain,), {name: lambda self: None})
    assert caught.value.remedy == contract._OLD_NAMES[name]


def test_a_method_of_a_mixin_is_refused_too():
    class Mixin:
        def describe(self, output):
            return {}

    with pytest.raises(UsageError, match=r"Mixed\.describe"):
        type("Mixed", (Mixin, own_tasks.Plain), {})


def test_coefficients_as_a_method_are_refused_and_as_a_property_are_read():
    with pytest.raises(UsageError, match=r"Mine\.coefficients: it is a method, but must be an attribute"):
        type("Mine", (own_tasks.Plain,), {"coefficients": lambda self: {}})

    class Computed(own_tasks.TwoHeads):
        @property
        def coefficients(self):
            return {"b": len("abc")}

    assert task_checks.coefficients(Computed()) == {"b": 3.0}


class LossWithOutput(own_tasks.Classes):
    """Its evaluations must not call `predict`."""

    in_training = False

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return (loss, model(batch[0]).softmax(dim=1)) if self.in_training or not model.training else loss

    def predict(self, model, batch):
        raise AssertionError("a second forward pass")


class AlsoInTraining(LossWithOutput):
    in_training = True


@pytest.mark.parametrize("kind", [LossWithOutput, AlsoInTraining])
def test_an_output_beside_the_loss_spares_predict_and_changes_nothing(tmp_path, kind):
    settings = runs.config(train={"steps": 4, "eval_every_steps": 2})
    weights, results = runs.fit(own_tasks.Classes(), settings, tmp_path / "apart")[:2]
    again, same = runs.fit(kind(), settings, tmp_path / "together")[:2]
    assert {name: same[name] for name in same if name.startswith("eval/")} == {
        name: results[name] for name in results if name.startswith("eval/")
    }
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_an_output_that_is_none_is_asked_of_predict(tmp_path):
    class NoOutput(own_tasks.Classes):
        def loss(self, model, batch):
            return super().loss(model, batch), None

    settings = runs.config(train={"steps": 2, "eval_every_steps": 2})
    results = runs.fit(NoOutput(), settings, tmp_path / "none")[1]
    assert results["eval/accuracy"] == runs.fit(own_tasks.Classes(), settings, tmp_path / "alone")[1]["eval/accuracy"]


def test_every_method_of_a_presenter_has_a_default():
    task = own_tasks.Plain()
    presenter = task.presenter(task)
    assert type(presenter) is Presenter
    assert presenter.describe(1.5) == {"output": 1.5}
    assert presenter.truth(object()) is None
    assert presenter.show(object()) == {}
    assert presenter.report({}, []) == ""
    assert presenter.log_header() == []
    assert presenter.export(task.model(), None) is None
    with pytest.raises(UsageError, match=r"Presenter\.inputs: Plain reads no files"):
        presenter.inputs(["a"])


def test_what_a_presenter_says_is_in_the_log(tmp_path):
    class Told(Presenter):
        def log_header(self):
            return [f"{self.task.length} samples"]

    class Telling(own_tasks.Plain):
        presenter = Told

    Trainer(runs.config(train={"steps": 1}), run_dir=tmp_path, quiet=True).fit(Telling())
    assert "240 samples" in (tmp_path / "train.log").read_text()


def test_metrics_with_an_update_of_their_own_are_fed_by_it():
    from torchmetrics import MeanMetric

    def update(metrics, output, batch):
        metrics.update(output[0] + batch)

    task = own_tasks.Plain()
    task.metrics = lambda: Metrics({"mean": MeanMetric()}, update)
    metrics, feed = task_checks.metrics(task)
    feed(metrics, torch.ones(1), torch.tensor(2.0))
    assert metrics.compute()["mean"] == 3.0
