"""The contract of a task: its methods are checked, and the loss may come with its output."""

import pytest
import torch
from torchmetrics import MeanMetric

from lockstep import Metrics, Presenter, Task, Trainer
from lockstep.core import task_checks
from lockstep.core.errors import LockstepError, TrainingError, UsageError
from tests import own_tasks, runs
from tests.ranks import run_ranks

METHODS = {
    "setup",
    "model",
    "train_data",
    "eval_data",
    "prepare",
    "collate",
    "weight",
    "loss",
    "embed",
    "predict",
    "metrics",
    "optimizer",
    "schedule",
    "tensor_plan",
}


def test_a_task_has_fourteen_methods_and_six_attributes():
    names = {name for name in vars(Task) if not name.startswith("_")}
    assert {name for name in names if callable(vars(Task)[name]) and name != "presenter"} == METHODS
    attributes = {"calls_vary", "coefficients", "frozen_epochs", "players", "presenter"}
    assert names - METHODS == attributes


def test_methods_of_a_presenter_in_a_task_are_noted_and_not_refused(tmp_path):
    kind = type("Helpful", (own_tasks.Plain,), {"report": lambda self: "mine", "show": lambda self: None})
    runs.fit(kind(), runs.config(train={"steps": 2}), tmp_path)
    assert (
        "note: Lockstep does not call Helpful's show, report; a lockstep.Presenter may"
        in (tmp_path / "train.log").read_text()
    )


class Failing(Presenter):
    def report(self, values, samples):
        raise RuntimeError("no paper")


class Shown(own_tasks.Classes):
    presenter = Failing


def test_report_that_fails_is_told_and_ends_no_training(tmp_path):
    runs.fit(Shown(eval_length=20), runs.config(train={"steps": 4, "eval_every_steps": 2}), tmp_path)
    assert "warning: Presenter.report failed: RuntimeError: no paper" in (tmp_path / "train.log").read_text()


def test_presenter_that_is_no_class_is_refused(tmp_path):
    class Wrong(own_tasks.Plain):
        presenter = None

    with pytest.raises(UsageError, match=r"Task\.presenter: it is None"):
        runs.fit(Wrong(), runs.config(train={"steps": 2}), tmp_path)


def test_metric_with_the_name_of_a_result_is_refused(tmp_path):
    class Named(own_tasks.Classes):
        def metrics(self):
            return Metrics({"loss": MeanMetric()}, lambda metrics, output, batch: metrics.update(output))

    with pytest.raises(UsageError, match=r"Task\.metrics: a metric is called 'loss'"):
        runs.fit(Named(eval_length=20), runs.config(train={"steps": 4, "eval_every_steps": 2}), tmp_path)


def test_coefficients_as_a_method_are_refused_and_as_a_property_are_read():
    with pytest.raises(UsageError, match=r"Mine\.coefficients: it is a method, but must be an attribute"):
        type("Mine", (own_tasks.Plain,), {"coefficients": lambda self: {}})

    class Computed(own_tasks.TwoHeads):
        @property
        def coefficients(self):
            return {"b": len("abc")}

    assert task_checks.coefficients(Computed()) == {"b": 3.0}


class LossWithOutput(own_tasks.Classes):
    predictions = 0

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return (loss, self.output(model, batch)) if not model.training else loss

    def output(self, model, batch):
        return super().predict(model, batch)

    def predict(self, model, batch):
        self.predictions += 1
        return super().predict(model, batch)


class OtherOutput(LossWithOutput):
    def output(self, model, batch):
        return model(batch[0])


class OtherShape(LossWithOutput):
    def output(self, model, batch):
        return super().output(model, batch)[0]


class OtherType(LossWithOutput):
    def output(self, model, batch):
        return {"logits": super().output(model, batch)}


class RandomOutput(LossWithOutput):
    def output(self, model, batch):
        return super().output(model, batch) * (0.5 + torch.rand(()))


class NoPredict(LossWithOutput):
    predict = Task.predict


EVALUATED = runs.config(train={"steps": 2, "eval_every_steps": 2})


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (OtherOutput, "the output differs by up to "),
        (OtherShape, "the output has the shape (3,), and (8, 3)"),
        (OtherType, "the output is a dict, and a Tensor"),
    ],
)
def test_an_output_of_loss_that_is_not_that_of_predict_is_an_error_before_the_first_step(tmp_path, task, words):
    with pytest.raises(
        UsageError, match="`loss` returns a different output than `predict` for the same batch"
    ) as caught:
        runs.fit(task(), EVALUATED, tmp_path)
    assert caught.value.where == "Task.loss, Task.predict"
    assert words in caught.value.what
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("task", [RandomOutput, NoPredict])
def test_an_output_that_cannot_be_compared_is_left_alone(tmp_path, task):
    assert "eval/accuracy" in runs.fit(task(), EVALUATED, tmp_path)[1]


def error_on_rank(kind, strategy, folder):
    try:
        runs.fit(kind(), EVALUATED | {"parallel": {"strategy": strategy}}, folder)
    except LockstepError as error:
        return str(error)
    return ""


@pytest.mark.cases("fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_compare_the_outputs_together(tmp_path, strategy):
    assert run_ranks(2, error_on_rank, LossWithOutput, strategy, tmp_path / "same") == ["", ""]
    for error in run_ranks(2, error_on_rank, OtherOutput, strategy, tmp_path / "other"):
        assert "`loss` returns a different output than `predict`" in error


@pytest.mark.parametrize("training", [True, False])
def test_a_tuple_of_three_is_refused_with_what_is_allowed(tmp_path, training):
    class Three(own_tasks.Classes):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return (loss, loss, loss) if model.training == training else loss

    with pytest.raises(TrainingError, match=r"Task\.loss(, in evaluation)?: it returned a tuple of 3") as caught:
        runs.fit(Three(), EVALUATED, tmp_path)
    assert "the pair (loss, output)" in caught.value.remedy


def test_metrics_that_are_updated_wrongly_are_told_of_the_class_that_helps(tmp_path):
    class Dict(own_tasks.Classes):
        def collate(self, samples):
            return dict(zip(("x", "y"), super().collate(samples), strict=True))

        def loss(self, model, batch):
            return super().loss(model, (batch["x"], batch["y"]))

        def predict(self, model, batch):
            return super().predict(model, (batch["x"], batch["y"]))

        def metrics(self):
            return MeanMetric()

    with pytest.raises(TrainingError, match=r"Task\.metrics: update\(.*\) failed: KeyError: 1") as caught:
        runs.fit(Dict(), EVALUATED, tmp_path)
    assert "return lockstep.Metrics(metrics, update)" in caught.value.remedy


@pytest.mark.exhaustive  # as test_an_output_that_cannot_be_compared_is_left_alone
def test_an_output_beside_the_loss_spares_predict_and_changes_nothing(tmp_path):
    settings = runs.config(train={"steps": 4, "eval_every_steps": 2})
    weights, results = runs.fit(own_tasks.Classes(), settings, tmp_path / "apart")[:2]
    task = LossWithOutput()
    again, same = runs.fit(task, settings, tmp_path / "together")[:2]
    assert task.predictions == 1  # before the first step, which compares it with the output of `loss`
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
