"""A task without dropout, batch statistics and coarse rounding, and otherwise unchanged."""

import inspect
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from lockstep import Metrics, Task
from lockstep.core.data.loader import MicroBatches
from lockstep.core.data.order import MicroBatchPlan
from lockstep_lab.verify import generators
from lockstep_lab.verify.comparable_task import (
    ComparableTask,
    DropoutDisabled,
    TaskChanges,
    _subset,
    batch_norm_modules,
    buffers_put_back,
    disable_dropout,
    freeze_statistics,
    sum_of_heads,
    to_float64,
)
from packages.lab.tests.verify import clean_tasks
from packages.lab.tests.verify.odd_tasks import Small
from tests import own_tasks
from tests.selection import mainly

EXACT = TaskChanges(exact=True)


class Around(clean_tasks.Base):
    """A task around any network of 12 inputs and 4 outputs."""

    def __init__(self, make):
        self.make = make

    def model(self):
        return self.make()


class Called(nn.Module):
    """Calls `drop(self, hidden)` between two layers."""

    def __init__(self, drop):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(12, 12), nn.Linear(12, 4), drop

    def forward(self, inputs):
        return self.last(self.drop(self, self.first(inputs)))


def attend(model, hidden, *arguments, **options):
    split = hidden.view(-1, 2, 3, 2)
    return functional.scaled_dot_product_attention(split, split, split, *arguments, **options).reshape(-1, 12)


def attend_with_weights(model, hidden):
    sequence = hidden.view(-1, 3, 4).transpose(0, 1)
    weights = torch.linspace(-1, 1, 64).view(16, 4)
    mixed, _ = functional.multi_head_attention_forward(
        sequence,
        sequence,
        sequence,
        4,
        2,
        weights[:12],
        None,
        None,
        None,
        False,
        0.5,
        weights[12:],
        None,
        training=model.training,
    )
    return mixed.transpose(0, 1).reshape(-1, 12)


class Encoder(nn.Module):
    def __init__(self, fast=False):
        super().__init__()
        self.inner, self.last = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=fast), nn.Linear(12, 4)

    def forward(self, inputs):
        return self.last(self.inner(inputs.view(-1, 3, 4)).flatten(1))


class Attention(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.inner, self.last, self.need_weights = (
            nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True),
            nn.Linear(12, 4),
            need_weights,
        )

    def forward(self, inputs):
        sequence = inputs.view(-1, 3, 4)
        return self.last(self.inner(sequence, sequence, sequence, need_weights=self.need_weights)[0].flatten(1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.last = kind(4, 4, 2, dropout=0.5, batch_first=True), nn.Linear(12, 4)

    def forward(self, inputs):
        return self.last(self.inner(inputs.view(-1, 3, 4))[0].flatten(1))


class Depth(nn.Module):
    """Stochastic depth, as libraries write it: an attribute and plain random numbers."""

    def __init__(self):
        super().__init__()
        self.last, self.drop_path_rate, self.p = nn.Linear(12, 4), 0.5, 0.25

    def forward(self, inputs):
        kept = torch.rand(len(inputs), 1) >= self.drop_path_rate if self.drop_path_rate else 1.0
        return self.last(inputs * kept) * self.p


def between(*layers):
    return lambda: nn.Sequential(nn.Linear(12, 12), *layers, nn.Linear(12, 4))


MODULES = {
    "Dropout": between(nn.Dropout(0.5)),
    "Dropout in place": between(nn.Dropout(0.5, inplace=True)),
    "Dropout1d": between(nn.Unflatten(1, (3, 4)), nn.Dropout1d(0.5), nn.Flatten()),
    "Dropout2d": between(nn.Unflatten(1, (3, 2, 2)), nn.Dropout2d(0.5), nn.Flatten()),
    "Dropout3d": between(nn.Unflatten(1, (3, 2, 2, 1)), nn.Dropout3d(0.5), nn.Flatten()),
    "AlphaDropout": between(nn.AlphaDropout(0.5)),
    "FeatureAlphaDropout": between(nn.Unflatten(1, (3, 4)), nn.FeatureAlphaDropout(0.5), nn.Flatten()),
    "TransformerEncoderLayer": Encoder,
    "TransformerEncoderLayer, batch first": lambda: Encoder(fast=True),
    "MultiheadAttention": lambda: Attention(False),
    "MultiheadAttention with weights": lambda: Attention(True),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "stochastic depth": Depth,
}
FUNCTIONS = {
    "dropout": lambda model, hidden: functional.dropout(hidden, 0.5, model.training),
    "dropout by name": lambda model, hidden: functional.dropout(input=hidden, p=0.5, training=model.training),
    "dropout in place": lambda model, hidden: functional.dropout(hidden, 0.5, model.training, inplace=True),
    "dropout also in evaluation": lambda model, hidden: functional.dropout(hidden),
    "torch.dropout": lambda model, hidden: torch.dropout(hidden, 0.5, model.training),
    "torch.alpha_dropout": lambda model, hidden: torch.alpha_dropout(hidden, 0.5, model.training),
    "dropout1d": lambda model, hidden: functional.dropout1d(hidden.view(-1, 3, 4), 0.5, model.training).flatten(1),
    "dropout2d": lambda model, hidden: functional.dropout2d(hidden.view(-1, 3, 2, 2), 0.5, model.training).flatten(1),
    "dropout3d": lambda model, hidden: functional.dropout3d(hidden.view(-1, 3, 2, 2, 1), 0.5, model.training).flatten(
        1
    ),
    "alpha_dropout": lambda model, hidden: functional.alpha_dropout(hidden, 0.5, model.training),
    "feature_alpha_dropout": lambda model, hidden: functional.feature_alpha_dropout(
        hidden.view(-1, 3, 4), 0.5, model.training
    ).flatten(1),
    "attention": lambda model, hidden: attend(model, hidden, dropout_p=0.5),
    "attention in order": lambda model, hidden: attend(model, hidden, None, 0.5),
    "attention in order, causal": lambda model, hidden: attend(model, hidden, None, 0.5, True),
    "multi-head attention as a function": attend_with_weights,
}
RANDOM = {**MODULES, **{f"functional {name}": lambda drop=drop: Called(drop) for name, drop in FUNCTIONS.items()}}


def batch_of(task, count=8):
    return task.collate([task.train_data()[index] for index in range(count)])


def twice(task, model):
    """The losses and gradients of two passes over one batch, from the same weights."""
    found = []
    for number in range(2):
        torch.manual_seed(number)
        model.zero_grad()
        loss = task.loss(model, batch_of(task))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    return found


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "name",
    mainly(
        ["LSTM", "MultiheadAttention", "functional dropout by name", "stochastic depth", "Dropout in place"], RANDOM
    ),
)
def test_a_pass_with_dropout_is_the_same_twice_in_train_mode(name):
    torch.manual_seed(0)
    plain = Around(RANDOM[name])
    assert not same(*twice(plain, plain.model().train())), "the case itself draws nothing"
    torch.manual_seed(0)
    exact = ComparableTask(plain, EXACT)
    model = exact.model().train()
    assert same(*twice(exact, model))
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize(
    "name",
    mainly(
        ["LSTM", "MultiheadAttention"],
        [name for name in MODULES if name not in ("AlphaDropout", "FeatureAlphaDropout", "stochastic depth")],
    ),
)
def test_without_dropout_a_module_is_what_it_is_in_evaluation(name):
    torch.manual_seed(0)
    exact = ComparableTask(Around(MODULES[name]), EXACT)
    model, batch = exact.model(), batch_of(exact)
    trained = exact.loss(model.train(), batch).detach()
    torch.testing.assert_close(trained, exact.loss(model.eval(), batch).detach())


def test_attention_keeps_its_mask_and_its_causality():
    torch.manual_seed(0)
    queries = torch.randn(2, 2, 5, 4)
    mask = torch.rand(5, 5) > 0.3
    for options in ({"attn_mask": mask}, {"is_causal": True}, {"scale": 0.1}):
        with DropoutDisabled():
            found = functional.scaled_dot_product_attention(queries, queries, queries, dropout_p=0.9, **options)
        torch.testing.assert_close(found, functional.scaled_dot_product_attention(queries, queries, queries, **options))
    with DropoutDisabled():
        found = functional.scaled_dot_product_attention(queries, queries, queries, mask, 0.9)
    torch.testing.assert_close(found, functional.scaled_dot_product_attention(queries, queries, queries, mask))


def test_a_function_of_the_user_that_is_named_dropout_is_left_alone():
    def dropout(tensor):
        return torch.add(tensor, 1)

    with DropoutDisabled():
        assert torch.equal(dropout(torch.zeros(2)), torch.ones(2))
        assert torch.equal(functional.relu(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_how_many_probabilities_were_there_is_counted():
    model = nn.Sequential(
        nn.Dropout(0.5),
        nn.Dropout(0.0),
        nn.LSTM(2, 2, 2, dropout=0.1),
        nn.MultiheadAttention(4, 2, dropout=0.2),
        Depth(),
        nn.Linear(2, 2),
    )
    assert disable_dropout(model) == 4
    assert disable_dropout(model) == 0
    assert model[4].p == 0.25


def test_a_model_without_dropout_gives_bitwise_the_same_loss_and_gradient():
    for plain in (clean_tasks.Base(), clean_tasks.Horizons(), own_tasks.Deep(60)):
        found = []
        for task in (plain, ComparableTask(plain, TaskChanges()), ComparableTask(plain, EXACT)):
            torch.manual_seed(3)
            model = task.model().train()
            loss = sum_of_heads(task.loss(model, batch_of(task)))
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert same(found[0], found[1])
        assert same(found[0], found[2])


def test_everything_else_is_the_tasks_own():
    plain = clean_tasks.Horizons()
    task = ComparableTask(plain, EXACT)
    batch = batch_of(plain)
    assert task.weight(batch) == plain.weight(batch)
    assert task.coefficients == {"far": 0.5}
    model = plain.model()
    assert torch.equal(task.predict(model, batch), plain.predict(model, batch))
    assert task.metrics() is None
    assert set(clean_tasks.Base().metrics()) == set(ComparableTask(clean_tasks.Base(), EXACT).metrics())
    shown = task.presenter(task)
    assert shown.describe(torch.zeros(2)) == {"risk": [0.0, 0.0]}
    assert shown.truth(plain.eval_data()[0]) == plain.presenter(plain).truth(plain.eval_data()[0])
    assert shown.task is plain
    assert ComparableTask(clean_tasks.NoEvaluation(), EXACT).eval_data() is None


def test_every_method_of_a_task_that_training_and_evaluation_call_is_passed_on():
    methods = {name for name, value in inspect.getmembers(Task, inspect.isfunction) if not name.startswith("_")}
    for how in (TaskChanges(), EXACT, TaskChanges(float64=True, reverse=True, no_augmentation=True, train_samples=3)):
        made = ComparableTask(clean_tasks.Augmented(), how)
        assert methods - vars(ComparableTask).keys() - vars(made).keys() == set()


def test_what_is_not_changed_is_the_tasks_own_method():
    """So that the engine finds out the same about it as in training, also where it was set on the object."""
    task = clean_tasks.Base()
    task.collate = lambda samples: task.__class__.collate(task, samples[::-1])
    for how in (
        TaskChanges(train_samples=20),
        TaskChanges(exact=True, float64=True, train_samples=20),
        TaskChanges(no_augmentation=True),
    ):
        made = ComparableTask(task, how)
        assert made.collate is task.collate
        assert made.prepare == task.prepare
    assert ComparableTask(task, TaskChanges(reverse=True)).collate is not task.collate
    task.prepare = lambda sample, epoch, training: sample
    assert ComparableTask(task, TaskChanges(no_augmentation=True)).prepare is not task.prepare
    assert ComparableTask(task, EXACT).prepare is task.prepare


@pytest.mark.parametrize(
    "how",
    [
        TaskChanges(train_samples=20),
        EXACT,
        TaskChanges(exact=True, float64=True, train_samples=20),
        TaskChanges(no_augmentation=True),
    ],
)
@pytest.mark.parametrize("kind", [clean_tasks.Base, clean_tasks.Augmented, clean_tasks.Tokens])
def test_a_check_reads_data_in_the_way_that_training_does(kind, how):
    training, verifying = (
        MicroBatches(task.train_data(), task, 0, training=True) for task in (kind(), ComparableTask(kind(), how))
    )
    assert (verifying.at_once, verifying.collates) == (training.at_once, training.collates)
    assert verifying.prepares == training.prepares
    assert (verifying.read_many is None) == (training.read_many is None)
    assert kind is not clean_tasks.Base or verifying.at_once


@pytest.mark.parametrize("how", [TaskChanges(), EXACT, TaskChanges(exact=True, float64=True, reverse=True)])
def test_methods_on_the_object_are_used_with_a_data_set_of_tensors(how):
    task = clean_tasks.Base()
    task.prepare = lambda sample, epoch, training: (sample[0] + 1, sample[1])
    task.collate = lambda samples: default_collate(samples)[::-1]
    made = ComparableTask(task, how)
    labels, inputs = MicroBatches(made.train_data(), made, 0, training=True)[MicroBatchPlan((3, 1), 0, False)].batch
    rows = [1, 3] if how.reverse else [3, 1]
    expected = task.train_data().tensors
    assert torch.equal(inputs, expected[0][rows] + 1)
    assert torch.equal(labels, expected[1][rows])


class Normed(clean_tasks.Base):
    def net(self):
        return nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def test_batch_norm_is_fixed_and_stays_so():
    torch.manual_seed(0)
    exact = ComparableTask(Normed(), EXACT)
    model = exact.model()
    norm = model[1]
    assert batch_norm_modules(model) == [norm]
    assert not norm.training
    model.train()
    assert model.training
    assert not norm.training
    before = [buffer.clone() for buffer in norm.buffers()]
    batch = batch_of(exact)
    whole = exact.loss(model, batch)
    parts = [exact.loss(model, [tensor[cut] for tensor in batch]) for cut in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(whole, sum(parts))
    assert same(before, norm.buffers())
    model.eval().train()
    assert not norm.training
    plain = Normed().model().train()
    assert plain[1].training


def test_fixed_batch_norm_has_the_statistics_of_some_samples():
    torch.manual_seed(0)
    exact = ComparableTask(Normed(), EXACT)
    model = exact.model()
    hidden = model[0](batch_of(exact)[0]).detach()
    torch.testing.assert_close(model[1].running_mean, hidden.mean(0))
    torch.testing.assert_close(model[1].running_var, hidden.var(0))
    assert model[1].momentum == 0.1
    torch.manual_seed(0)
    again = exact.model()
    assert same(model.state_dict().values(), again.state_dict().values())


def test_batch_norm_of_a_model_without_values_is_only_fixed():
    with torch.device("meta"):
        model = ComparableTask(Normed(), EXACT).model()
    assert model[1].train() is model[1]
    assert not model[1].training


def test_fixing_is_of_one_module_alone():
    one, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    freeze_statistics(one)
    assert not one.train(True).training
    assert other.train(True).training


def test_double_converts_the_model_and_the_batch():
    plain = Dtypes()
    exact = ComparableTask(plain, TaskChanges(exact=True, float64=True))
    model, batch = exact.model(), batch_of(exact)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float64}
    assert [tensor.dtype for tensor in batch] == [
        torch.float32,
        torch.int64,
    ]  # as in training: where it is used, it is converted
    output = exact.predict(model, batch)
    exact.weight(batch)
    exact.metrics().update(None, output, batch)
    assert exact.loss(model, batch).dtype == torch.float64
    assert plain.seen == {name: [torch.float64, torch.int64] for name in ("weight", "loss", "predict", "metrics")}
    plain.seen.clear()
    ComparableTask(plain, EXACT).loss(plain.model(), batch)
    assert plain.seen == {"loss": [torch.float32, torch.int64]}
    nested = to_float64({"a": [torch.ones(1), (torch.ones(1, dtype=torch.int32), "b")], "c": None})
    assert nested["a"][0].dtype == torch.float64
    assert nested["a"][1][0].dtype == torch.int32
    assert nested["c"] is None


class Dtypes(clean_tasks.Base):
    """Notes the number formats of the batches that its methods get."""

    def __init__(self):
        self.seen = {}

    def weight(self, batch):
        self.seen["weight"] = [tensor.dtype for tensor in batch]

    def loss(self, model, batch):
        self.seen["loss"] = [tensor.dtype for tensor in batch]
        return super().loss(model, batch)

    def predict(self, model, batch):
        self.seen["predict"] = [tensor.dtype for tensor in batch]
        return super().predict(model, batch)

    def metrics(self):
        return Metrics(super().metrics(), self.update)

    def update(self, metrics, output, batch):
        self.seen["metrics"] = [tensor.dtype for tensor in batch]


class Named(Dataset):
    lengths = list(range(100, 200))  # noqa: RUF012

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return index

    def where(self, index):
        return f"file-{index}"


@pytest.mark.parametrize("count", [1, 2, 3, 7, 33, 50, 99])
def test_a_part_is_evenly_spread(count):
    part = _subset(Named(), count)
    taken = [part[place] for place in range(len(part))]
    assert len(taken) == count
    steps = np.diff([*taken, 100])
    assert taken[0] == 0
    assert min(steps) >= 100 // count
    assert max(steps) <= -(-100 // count)


def test_a_part_keeps_lengths_and_names():
    part = _subset(Named(), 4)
    assert list(part.lengths) == [100, 125, 150, 175]
    assert [part.where(place) for place in range(4)] == ["file-0", "file-25", "file-50", "file-75"]
    assert not hasattr(part, "__getitems__")
    unnamed = _subset(list(range(10)), 2)
    assert unnamed.lengths is None
    assert (unnamed.where(1), unnamed[1]) == ("list[5]", 5)


def test_a_part_of_tensors_are_tensors():
    whole = TensorDataset(torch.arange(10), torch.arange(20).view(10, 2))
    whole.lengths = list(range(10, 20))
    part = _subset(whole, 2)
    assert list(part.lengths) == [10, 15]
    assert type(part) is TensorDataset
    assert [tensor.tolist() for tensor in part.tensors] == [[0, 5], [[0, 1], [10, 11]]]


def test_a_part_is_read_at_once_where_the_data_set_is():
    class Many(Named):
        def __getitems__(self, indices):
            return [-index for index in indices]

    part = _subset(Many(), 4)
    assert part.__getitems__([1, 3, 0]) == [-25, -75, 0]
    assert pickle.loads(pickle.dumps(_subset(Subset(Named(), range(50)), 5))).__getitems__([1, 2]) == [10, 20]


def test_no_part_and_a_part_of_everything_are_the_data_set_itself():
    data = Named()
    assert _subset(data, None) is data
    assert _subset(data, 100) is data
    assert _subset(data, 101) is data


def test_training_and_evaluation_have_parts_of_their_own():
    task = ComparableTask(clean_tasks.Base(), TaskChanges(train_samples=10, eval_samples=3))
    assert (len(task.train_data()), len(task.eval_data())) == (10, 3)
    task = ComparableTask(clean_tasks.Base(), TaskChanges(train_samples=10))
    assert len(task.eval_data()) == 130


def test_reverse_keeps_the_sum_and_turns_the_order():
    plain = clean_tasks.Base()
    forth, back = (
        ComparableTask(plain, TaskChanges(float64=True)),
        ComparableTask(plain, TaskChanges(float64=True, reverse=True)),
    )
    torch.manual_seed(0)
    model = forth.model()
    one, other = batch_of(forth), batch_of(back)
    assert torch.equal(one[0], other[0].flip(0))
    assert [MicroBatches(task.train_data(), task, 0, training=True).at_once for task in (forth, back)] == [True, False]
    assert not torch.equal(one[0], other[0])
    torch.testing.assert_close(forth.loss(model, one), back.loss(model, other), rtol=1e-12, atol=0)


def test_disturbing_changes_generators_and_nothing_else():
    plain = clean_tasks.Horizons()
    task, batch = ComparableTask(plain, TaskChanges(disturb_generators=True)), batch_of(plain)
    torch.manual_seed(0)
    before = generators.states()
    assert task.weight(batch) == plain.weight(batch)
    between = generators.states()
    task.weight(batch)
    assert all(len({before[name], between[name], after}) == 3 for name, after in generators.states().items())


class Pairs(clean_tasks.Base):
    """Each sample is paired with another one in each epoch, as for a siamese network."""

    def prepare(self, sample, epoch, training):
        return sample[0] + torch.randn(12), (sample[1] + epoch + random.randrange(4)) % 4


def test_few_samples_can_be_the_same_in_each_epoch():
    task = ComparableTask(Pairs(), TaskChanges(train_samples=8, no_augmentation=True, same_in_each_epoch=True))
    data = task.train_data()
    assert len(data) == 8
    first, later = ([task.prepare(data[index], epoch, True) for index in range(8)] for epoch in (0, 3))
    assert [label for _, label in first] == [label for _, label in later]
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(first, later, strict=True))
    first[0][0].zero_()  # as a `collate` that works in place
    assert torch.equal(task.prepare(data[0], 0, True)[0], later[0][0])


def test_plain_samples_are_prepared_as_for_evaluation():
    sample = (torch.zeros(12), 1)
    assert torch.equal(
        ComparableTask(clean_tasks.Augmented(), TaskChanges(no_augmentation=True)).prepare(sample, 0, True)[0],
        sample[0],
    )
    assert not torch.equal(ComparableTask(clean_tasks.Augmented(), EXACT).prepare(sample, 0, True)[0], sample[0])


class LinesAndPairs(Small):
    """Training samples are lines of a stream, and evaluation samples are pairs, so `prepare` has a branch for each."""

    def __init__(self, fails):
        self.fails = fails

    def prepare(self, sample, epoch, training):
        if training:
            return torch.tensor([float(word) for word in sample.split()]) + 0.0 * torch.randn(2), 1
        assert not (self.fails and isinstance(sample, str))
        return sample


def test_a_training_sample_that_cannot_be_prepared_as_for_evaluation_is_prepared_as_in_training():
    for fails in (True, False):
        task = ComparableTask(LinesAndPairs(fails), TaskChanges(no_augmentation=True))
        inputs, label = task.prepare("1 2", 0, True)
        assert (inputs.tolist(), label) == ([1.0, 2.0], 1)
        assert task.prepare(("pair", 2), 0, False) == ("pair", 2)


def test_a_total_is_the_sum_over_heads_in_their_own_format():
    assert sum_of_heads({"a": torch.tensor(1.0), "b": torch.tensor(2.5)}) == 3.5
    one = torch.tensor(1.0)
    assert sum_of_heads(one) is one
    assert sum_of_heads({"a": torch.tensor(1.0, dtype=torch.float64)}).dtype == torch.float64
    assert sum_of_heads({"a": torch.tensor(1.0, dtype=torch.bfloat16)}).dtype == torch.bfloat16


def test_complex_numbers_become_complex_numbers_of_double_precision():
    plain = Small()
    plain.model = lambda: nn.ParameterDict({"a": torch.ones(2, dtype=torch.complex64), "b": torch.ones(2)})
    model = ComparableTask(plain, TaskChanges(float64=True)).model()
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == {
        "a": torch.complex128,
        "b": torch.float64,
    }
    assert to_float64([torch.ones(1, dtype=torch.complex64)])[0].dtype == torch.complex128


def test_named_buffers_are_put_back_after_a_pass():
    model = nn.Sequential(nn.BatchNorm1d(3))
    mean = model[0].running_mean
    with buffers_put_back(model, ["0.running_mean"]):
        model(torch.randn(4, 3) + 5)
        assert model[0].running_mean.abs().sum() > 0.5
    assert model[0].running_mean is mean
    assert mean.tolist() == [0.0, 0.0, 0.0]
    assert not torch.equal(model[0].running_var, torch.ones(3))
