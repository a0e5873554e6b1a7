"""What a task's methods return where its type is wrong: the method, what came, and what is wanted."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import LockstepError, Trainer
from lockstep.core import task_checks
from tests import own_tasks, rank_cases, runs
from tests.ranks import run_ranks


def returning(base, method, value):
    """A task of which one method returns `value`."""
    return type("Odd", (base,), {method: lambda self: value})()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class StreamWithLength(Stream):
    def __len__(self):
        return 10


class NoLength(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index


DATA = TensorDataset(torch.zeros(30, 10), torch.zeros(30, 5))
WRONG_DATA = [
    (DataLoader(DATA), "returned a DataLoader", "return the data set, not a loader"),
    (Stream(), "returned a Stream, which is an IterableDataset", "lockstep.Stream"),
    (StreamWithLength(), "returned a StreamWithLength, which is an IterableDataset", "lockstep.Stream"),
    (NoLength(), "returned a NoLength, which has no length", "map-style"),
    (TensorDataset, "returned the class TensorDataset, not an object of it", "map-style"),
    ({"train": DATA, "test": DATA}, "returned a dict with the keys 'train', 'test'", "return one of its data sets"),
    (iter([1]), "returned a list_iterator", "map-style"),
    (7, "returned an int", "map-style"),
]


@pytest.mark.parametrize("method", ["train_data", "eval_data"])
@pytest.mark.parametrize(("value", "came", "wanted"), WRONG_DATA, ids=[came for _, came, _ in WRONG_DATA])
def test_data_that_cannot_be_read_in_any_order_is_named(tmp_path, method, value, came, wanted):
    task = returning(own_tasks.Plain, method, value)
    with pytest.raises(LockstepError) as caught:
        runs.fit(task, runs.config(train={"eval_every_steps": 5}), tmp_path)
    assert str(caught.value).startswith(f"Task.{method}: {came}")
    assert wanted in str(caught.value)
    assert caught.value.exit_code == 2
    assert not caught.value.retryable  # a launcher need not try again


def test_no_training_data_are_named(tmp_path):
    with pytest.raises(LockstepError, match=r"Task\.train_data: returned None"):
        runs.fit(returning(own_tasks.Plain, "train_data", None), runs.config(), tmp_path)


def test_data_to_predict_are_checked_like_those_of_the_task(tmp_path):
    runs.fit(own_tasks.Classes(), runs.config(train={"steps": 1}), tmp_path)
    with pytest.raises(LockstepError, match=r"the data to predict: returned a DataLoader"):
        Trainer(runs.config(), run_dir=tmp_path, quiet=True).predict(own_tasks.Classes(), DataLoader(DATA))


def test_a_list_is_a_data_set(tmp_path):
    samples = [
        (torch.ones(10, dtype=torch.float64) * number, torch.zeros(5, dtype=torch.float64)) for number in range(30)
    ]
    task = returning(own_tasks.Plain, "train_data", samples)
    assert runs.fit(task, runs.config(train={"steps": 2}), tmp_path)[1]["step"] == 2


WRONG_MODELS = [
    (None, "returned None"),
    (nn.Linear, "returned the class Linear, not an object of it"),
    ((nn.Linear(2, 2), None), "returned a tuple of Linear, NoneType"),
    (nn.Linear(2, 2).state_dict(), "returned an OrderedDict"),
]


@pytest.mark.parametrize(("value", "came"), WRONG_MODELS, ids=[came for _, came in WRONG_MODELS])
def test_model_that_is_no_module_is_named(tmp_path, value, came):
    with pytest.raises(LockstepError) as caught:
        runs.fit(returning(own_tasks.Plain, "model", value), runs.config(), tmp_path)
    assert str(caught.value).startswith(f"Task.model: {came}\n  remedy: return a torch.nn.Module")


class NoModel(own_tasks.Plain):
    def model(self):
        return None


@rank_cases.impatient()
def fit_no_model():
    try:
        runs.fit(NoModel(), runs.config(parallel={"strategy": "fsdp"}))
    except LockstepError as error:
        return str(error)


def test_model_that_is_none_is_named_on_all_ranks_where_rank_0_alone_makes_it_in_full():
    for message in run_ranks(2, fit_no_model):
        assert "Task.model: returned None" in message


def wrong_metrics():
    from torchmetrics import MeanMetric

    return [
        ((MeanMetric(),), "returned a tuple of MeanMetric"),
        ([MeanMetric(), MeanMetric()], "returned a list of MeanMetric, MeanMetric"),
        (MeanMetric, "returned the class MeanMetric, not an object of it"),
        ({"mean": MeanMetric}, "returned a dict"),
        ("accuracy", "returned a str"),
    ]


@pytest.mark.parametrize("number", range(5))
def test_metrics_that_are_none_are_named_before_anything_is_computed(tmp_path, number):
    value, came = wrong_metrics()[number]

    class Odd(own_tasks.Classes):
        def metrics(self):
            return value

        def loss(self, model, batch):
            assert not model.training, "it trained"
            return super().loss(model, batch)

    with pytest.raises(LockstepError) as caught:
        runs.fit(Odd(), runs.config(train={"steps": 2, "eval_every_steps": 2}), tmp_path)
    assert str(caught.value).startswith(f"Task.metrics: {came}\n  remedy: return a torchmetrics.MetricCollection")


def test_one_metric_and_a_dict_of_metrics_are_made_a_collection():
    from torchmetrics import MeanMetric, MetricCollection, SumMetric

    def names(value):
        found, _ = task_checks.metrics(returning(own_tasks.Plain, "metrics", value))
        return found if found is None else list(found)

    assert names(None) is None
    assert names({}) is None
    assert names(MetricCollection({})) is None
    assert names(MeanMetric()) == ["MeanMetric"]
    assert names({"a": MeanMetric(), "b": SumMetric()}) == ["a", "b"]
    assert names({"a": MeanMetric(), "b": MetricCollection({"c": SumMetric()})}) == ["a", "b_c"]
    assert names(MetricCollection([MeanMetric()])) == ["MeanMetric"]


def test_one_metric_is_evaluated(tmp_path):
    class One(own_tasks.Classes):
        def metrics(self):
            from torchmetrics.classification import MulticlassAccuracy

            return MulticlassAccuracy(3, average="micro")

    settings = runs.config(train={"steps": 2, "eval_every_steps": 2})
    several = runs.fit(own_tasks.Classes(), settings, tmp_path / "several")[1]
    assert runs.fit(One(), settings, tmp_path / "one")[1]["eval/MulticlassAccuracy"] == several["eval/accuracy"]


@pytest.mark.parametrize("as_collection", [True, False])
def test_metrics_that_agree_on_the_first_batch_are_not_taken_for_the_same(as_collection):
    """torchmetrics would update one of them for both from then on."""
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy

    class Ranked(own_tasks.Plain):
        def metrics(self):
            metrics = {f"top{k}": MulticlassAccuracy(4, average="micro", top_k=k) for k in (2, 3)}
            return MetricCollection(metrics, prefix="my_") if as_collection else metrics

    metrics, _ = task_checks.metrics(Ranked())
    scores, names = torch.tensor([[0.4, 0.3, 0.2, 0.1]]), [f"{'my_' * as_collection}top{k}" for k in (2, 3)]
    metrics.update(scores, torch.tensor([0]))  # right by both
    metrics.update(scores, torch.tensor([2]))  # right by top-3 only
    values = {name: float(value) for name, value in metrics.compute().items()}
    assert values == dict(zip(names, (0.5, 1.0), strict=True))


class OldPrepare(own_tasks.Plain):
    def prepare(self, sample):
        return sample


class Decorated(own_tasks.Plain):
    @functools.wraps(OldPrepare.prepare)
    def prepare(self, *arguments):
        return arguments[0]


def test_a_method_with_other_arguments_is_named_before_anything_is_read(tmp_path):
    line = OldPrepare.prepare.__code__.co_firstlineno
    with pytest.raises(LockstepError) as caught:
        runs.fit(OldPrepare(), runs.config(), tmp_path)
    assert str(caught.value).startswith(f"Task.prepare ({__file__}:{line}): it takes (sample), and is called with")
    assert caught.value.remedy == "write def prepare(self, sample, epoch, training)"
    assert caught.value.exit_code == 2
    task_checks.signatures(Decorated())
