"""Trainings on streams: the samples of plain torch on every number of ranks and workers, and after every restart."""

import itertools
import os
import threading

import datasets
import numpy as np
import pytest
import torch

import lockstep
from lockstep import LockstepError
from tests import own_tasks, runs
from tests.ranks import run_ranks
from tests.selection import mainly
from tests.stream_cases import (
    LENGTH,
    Drawing,
    Forgetful,
    Numbers,
    Stateful,
    Streamed,
    by_hand,
    row,
    settings,
    trained,
)

STEPS = 11


@pytest.fixture(scope="module")
def plain():
    return by_hand(STEPS)


@pytest.mark.parametrize(("world", "workers"), mainly([(2, 2)], [(1, 0), (2, 2), (3, 0)]))
def test_a_stream_trains_as_plain_torch_on_every_number_of_ranks_and_workers(plain, world, workers, tmp_path):
    config = settings(STEPS, data={"workers": workers}, batch={"global": 9, "micro": 2})
    for weights, _ in run_ranks(world, trained, {}, config, tmp_path):
        assert runs.difference(weights, plain) < 1e-10


@pytest.mark.parametrize("world", mainly([3], [1, 3]))
def test_an_epoch_is_a_pass_where_its_length_is_known(world, tmp_path):
    config = settings(STEPS, train={"epochs": 3, "steps": None})
    expected = by_hand(12, epochs=True)
    for weights, _ in run_ranks(world, trained, {"kind": Numbers, "length": LENGTH}, config, tmp_path):
        assert runs.difference(weights, expected) < 1e-10


@pytest.mark.cases("Stateful")
@pytest.mark.parametrize("kind", mainly([Stateful, Numbers], [Stateful, Numbers, Forgetful]))
def test_a_run_goes_on_within_a_pass_on_another_number_of_ranks(kind, plain, tmp_path):
    run_ranks(2, trained, {"kind": kind}, settings(6), tmp_path)
    for weights, read in run_ranks(3, trained, {"kind": kind}, settings(STEPS), tmp_path):
        assert runs.difference(weights, plain) < 1e-10
        if kind is Stateful:  # 45 samples, and some of the last five again; the first three are compared
            assert 40 < read <= 45 + 5 + 3
        if kind is Forgetful:  # the pass that has 19 samples before the place
            assert read > 45 + 19


def test_a_stream_that_does_not_repeat_itself_is_an_error_when_a_run_goes_on(tmp_path):
    trained({"kind": Numbers}, settings(6), tmp_path)
    with pytest.raises(LockstepError, match=r"sample 50 \(sample 19 of pass 2\) differs from the sample"):
        trained({"kind": Later}, settings(STEPS), tmp_path)


class Later(Numbers):
    """Another stream after its first pass."""

    def __iter__(self):
        for inputs, target in super().__iter__():
            yield inputs + (self.epoch > 0), target


@pytest.mark.exhaustive  # as test_a_shuffled_stream_of_datasets_goes_on_with_the_same_samples
def test_what_a_stream_draws_depends_on_the_position_alone(tmp_path):
    one, two = (run_ranks(world, trained, {"kind": Drawing}, settings(5), tmp_path / str(world)) for world in (1, 2))
    assert runs.difference(one[0][0], two[0][0]) < 1e-10
    assert runs.difference(one[0][0], by_hand(5)) > 1e-3, "it draws"


def of_the_rank(config, folder):
    with pytest.raises(LockstepError, match=r"the ranks have different training data: sample 0 of rank 1"):
        trained({"kind": OfTheRank}, config, folder)


class OfTheRank(Numbers):
    def __iter__(self):
        return itertools.islice(super().__iter__(), int(os.environ["RANK"]), None, 2)


def test_a_stream_that_is_divided_among_the_ranks_is_refused(tmp_path):
    run_ranks(2, of_the_rank, settings(3), tmp_path)


def test_the_watch_recomputes_a_neighbours_part_of_a_stream(plain, tmp_path):
    config = settings(STEPS, watch={"every": 2}, checkpoint={"every_steps": 3})
    for weights, _ in run_ranks(2, trained, {}, config, tmp_path):
        assert runs.difference(weights, plain) < 1e-10


class Broken(Numbers):
    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 12)
        raise ValueError("broken line 12")


def test_a_stream_that_fails_is_named_and_never_skipped(tmp_path):
    for on_error in ("raise", "skip"):
        with pytest.raises(LockstepError, match=r"test_streams.py:\d+: the stream failed at sample 12.*broken line 12"):
            trained({"kind": Broken}, settings(3, data={"on_error": on_error}), tmp_path / on_error)


class Changing(Streamed):
    """It changes samples in place, and draws from NumPy, so that the first micro-batch is read twice."""

    def prepare(self, sample, epoch, training):
        sample["inputs"] += float(np.random.rand() < 2)
        return sample["inputs"] + 0.1 * torch.randn(4, dtype=torch.float64), sample["target"]


class Mappings(Numbers):
    def __iter__(self):
        for inputs, target in super().__iter__():
            yield {"inputs": inputs - 1, "target": target}


def changing(config, folder):
    return runs.fit(Changing(kind=Mappings), config, folder)[0]


def test_samples_may_be_changed_in_place_also_where_they_are_read_again(plain, tmp_path):
    config = settings(STEPS, watch={"every": 2}, checkpoint={"every_steps": 3})
    for weights in run_ranks(2, changing, config, tmp_path):
        assert runs.difference(weights, plain) < 1e-10


class OneDict(Numbers):
    """It fills the arrays of one dict again and again, and the watch reads samples a second time."""

    def __iter__(self):
        arrays = {"inputs": np.zeros(4), "more": [np.zeros(2), 0]}
        for number, (inputs, target) in enumerate(super().__iter__()):
            arrays["inputs"][:], arrays["more"][0][:], arrays["more"][1] = inputs, target, number
            yield arrays


class OneTensor(Numbers):
    """It reads rows into a buffer, three at a time, and gives views of the buffer."""

    def __iter__(self):
        buffer = torch.zeros(3, 6, dtype=torch.float64)
        samples = super().__iter__()
        while rows := list(itertools.islice(samples, 3)):
            for place, parts in enumerate(rows):
                buffer[place] = torch.cat(parts)
            yield from buffer[: len(rows)]


class FromBuffers(Streamed):
    def prepare(self, sample, epoch, training):
        if isinstance(sample, dict):
            assert int(16 * (sample["more"][0][0] + 1)) == sample["more"][1]
            sample = torch.as_tensor(sample["inputs"]), torch.as_tensor(sample["more"][0])
        else:
            sample = sample[:4], sample[4:]
        return super().prepare(sample, epoch, training)


def from_buffers(kind, config, folder):
    return runs.fit(FromBuffers(kind=kind), config, folder)[0]


@pytest.mark.cases("OneDict")
@pytest.mark.parametrize("kind", [OneDict, OneTensor])
def test_a_stream_may_fill_its_buffers_again(plain, kind, tmp_path):
    config = settings(STEPS, watch={"every": 2}, batch={"global": 9, "micro": 2})
    for weights in run_ranks(2, from_buffers, kind, config, tmp_path):
        assert runs.difference(weights, plain) < 1e-10


def test_attributes_of_other_data_sets_mean_nothing(tmp_path):
    class Ahead(own_tasks.Plain):
        def train_data(self):
            data = super().train_data()
            data.read_ahead, data.take_places, data.compared = 8, 1, 0.5
            return data

        def prepare(self, sample, epoch, training):
            return sample

    runs.fit(Ahead(), runs.config(train={"steps": 2}), tmp_path)


def test_another_global_batch_is_allowed_and_the_log_names_the_samples(tmp_path):
    runs.fit(Streamed(), settings(4), tmp_path)
    runs.fit(Streamed(), settings(6, batch={"global": 6}), tmp_path, allow_change=["batch.global"])
    log = (tmp_path / "train.log").read_text()
    assert "samples 24 to 35 of the stream are used again" in log


def rows(shards):
    for shard in shards:
        for number in range(shard * 8, shard * 8 + 8):
            inputs, target = row(number, 0)
            yield {"x": inputs.tolist(), "y": target.tolist()}


class OfDatasets(Streamed):
    """A stream of the library datasets, with a shuffle buffer, which its state does not hold."""

    def train_data(self):
        source = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(4))})
        return lockstep.Stream(source.shuffle(seed=0, buffer_size=10), state_every=5)

    def prepare(self, sample, epoch, training):
        return torch.tensor(sample["x"], dtype=torch.float64), torch.tensor(sample["y"])


def of_datasets(config, folder):
    return runs.fit(OfDatasets(), config, folder)[0]


def test_a_shuffled_stream_of_datasets_goes_on_with_the_same_samples(tmp_path):
    (whole,) = run_ranks(1, of_datasets, settings(9), tmp_path / "whole")
    run_ranks(1, of_datasets, settings(5), tmp_path / "cut")
    for weights in run_ranks(2, of_datasets, settings(9), tmp_path / "cut"):
        assert runs.difference(weights, whole) < 1e-10


class Empty(Numbers):
    def __init__(self):
        super().__init__(0)


class Uncopied(Numbers):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Unsaved(Stateful):
    def state_dict(self):
        return {"at": object()}


@pytest.mark.parametrize(
    ("options", "config", "match"),
    [
        ({}, {"train": {"epochs": 2, "steps": None}}, "a stream of unknown length has no epochs"),
        ({}, {"data": {"balance": "label"}}, "samples of a stream cannot be drawn by weights"),
        (
            {"length": 40},
            {"train": {"epochs": 2, "steps": None}},
            "pass 1 has 31 samples, but its length is given",
        ),
        ({"length": 30}, {"train": {"epochs": 2, "steps": None}}, "pass 1 has more than 30 samples"),
        ({"kind": Empty}, {}, "pass 1 has no samples"),
        ({"kind": Uncopied}, {}, r"a Uncopied cannot be copied(?s:.*)lockstep.Stream\(lambda: "),
        ({"kind": Unsaved}, {}, "the state cannot be saved: .*object"),
    ],
)
def test_what_cannot_be_kept_is_refused(options, config, match, tmp_path):
    with pytest.raises(LockstepError, match=match):
        trained(options, settings(STEPS, **config), tmp_path)


def test_what_is_no_stream_is_refused():
    for samples in (iter([1]), 5):
        with pytest.raises(LockstepError, match=r"Stream\(samples\)"):
            lockstep.Stream(samples)
    for options in ({"length": 0}, {"length": 2.5}, {"state_every": True}):
        with pytest.raises(LockstepError, match=r"give a number of samples"):
            lockstep.Stream([1], **options)


def test_evaluation_data_cannot_be_a_stream(tmp_path):
    task = Streamed()
    runs.fit(task, settings(3), tmp_path)
    with pytest.raises(LockstepError, match="a Stream, which has no samples by index"):
        lockstep.Trainer(settings(3), run_dir=tmp_path, quiet=True).predict(task, task.train_data())


class Noisy(torch.utils.data.IterableDataset):
    """Its samples have the noise of its own generator."""

    def __init__(self, rng):
        self.rng = rng

    def __iter__(self):
        yield from (float(self.rng.normal()) for _ in range(4))


def test_each_pass_reads_the_source_as_it_was_given():
    rng = np.random.default_rng(0)
    stream = lockstep.Stream(Noisy(rng))
    expected = np.random.default_rng(0).normal(size=4).tolist()
    for position in range(8):
        rng.normal()  # others use the generator, too
        assert stream[position] == expected[position % 4]


def test_a_pass_that_begins_differently_when_a_run_resumes_is_an_error():
    """Although the run is shorter than the distance of two states."""
    numbers = itertools.count()
    first, again = (lockstep.Stream(lambda: [next(numbers), 1, 2]) for _ in range(2))
    samples = [first[position] for position in range(5)]
    assert samples == [0, 1, 2, 1, 1]
    first.passed(first.take_places())
    again.begin_at(first.newest_mark(5))
    with pytest.raises(LockstepError, match=r"sample 3 \(sample 0 of pass 2\) differs from the sample when the state"):
        again[5]
