"""Samples are prepared the same wherever and whenever they are prepared; bad ones are named."""

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import time
import zlib

import numpy as np
import pytest
import torch

from lockstep import LockstepError, Trainer
from lockstep.core import plugins
from lockstep.core.build import Run
from lockstep.core.data import worker_deaths, workers
from lockstep.core.data.loader import Loader, MicroBatch, MicroBatches, StepIterator
from lockstep.core.data.order import MicroBatchPlan, StepPlan
from lockstep.core.errors import DataError, TrainingError
from tests import own_tasks, runs
from tests.processes import is_running, launched, wait_for
from tests.ranks import run_ranks

CPU = torch.device("cpu")


class Noisy(own_tasks.FromFiles):
    """Draws from all three random number generators."""

    def prepare(self, sample, epoch, training):
        return sample[0][:1], torch.rand(1), np.random.rand(), random.random()


def prepared(workers, micro, start, world=1):
    """What each sample became, by (step, index)."""
    task = Noisy(24)
    plan = StepPlan(24, 8, micro, world, seed=3)
    found = {}
    for rank in range(world):
        loader = Loader(MicroBatches(task.train_data(), task, 3, training=True), workers, CPU)
        for step, micros in enumerate(
            StepIterator(loader, plan, ranks=range(rank, rank + 1), start=start, stop=6), start
        ):
            for item in micros:
                _, torch_draw, numpy_draw, python_draw = item.batch
                for place, index in enumerate(item.indices):
                    found[step, index] = (float(torch_draw[place]), float(numpy_draw[place]), float(python_draw[place]))
    return found


def test_randomness_of_a_sample_depends_on_nothing_but_seed_epoch_and_index():
    reference = prepared(workers=0, micro=8, start=0)
    assert len(set(reference.values())) == len(reference) == 48  # two epochs of 24: all draws differ
    assert prepared(workers=2, micro=3, start=0, world=2) == reference
    resumed = prepared(workers=0, micro=5, start=4)
    assert resumed == {key: value for key, value in reference.items() if key[0] >= 4}


def test_loader_workers_that_are_not_forked_read_the_same(tmp_path, monkeypatch):
    """They get their data by pickle: on macOS, from Python 3.14 on, and where a task sets another start method."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "unforked.py"
    file.write_text("from tests.core.data.test_loader import Noisy\n\nclass Mine(Noisy):\n    pass\n")
    module = plugins.import_file(file, prefix="lockstep_user_", where="", is_main=True)
    task, plan = module.Mine(24), MicroBatchPlan((5, 2, 7), 1, False)
    batches = Loader(MicroBatches(task.train_data(), task, 3, training=True), 1, CPU).batches
    expected = batches.dataset[plan]
    parts = (batches.dataset, batches.collate_fn, batches.worker_init_fn)
    sent = pickle.dumps(parts)
    del sys.modules[module.__name__]
    dataset, _, _ = pickle.loads(sent)
    del sys.modules[module.__name__]  # workers of other tests would execute the file
    found = dataset[plan]
    assert all(torch.equal(one, other) for one, other in zip(found.batch, expected.batch, strict=True))


def test_preparing_leaves_the_training_rng_to_the_step():
    """The forward pass is seeded by the step: dropout is the same whatever was drawn while loading."""
    one, _ = runs.fit(own_tasks.Dropout(), runs.config(data={"workers": 0}))
    other, _ = runs.fit(own_tasks.Dropout(), runs.config(data={"workers": 2}))
    assert runs.difference(one, other) == 0


def test_tensors_read_at_once_are_those_read_one_by_one():
    class OneByOne(own_tasks.Plain):
        def collate(self, samples):
            return super().collate(samples)

    quick, slow = (MicroBatches(task.train_data(), task, 0, training=True) for task in (own_tasks.Plain(), OneByOne()))
    assert quick.at_once
    assert not slow.at_once
    micro_batch = MicroBatchPlan((7, 3, 200), 0, False)
    for one, other in zip(quick[micro_batch].batch, slow[micro_batch].batch, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    assert type(quick[micro_batch].batch) is type(slow[micro_batch].batch)


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_sample_names_its_file(workers):
    task = own_tasks.FromFiles(8, broken=[5])
    loader = Loader(MicroBatches(task.train_data(), task, 0, training=True), workers, CPU)
    before = {process.pid for process in worker_deaths._workers}  # other tests of this process may have left some
    with pytest.raises(
        LockstepError, match=r"folder/005\.png: sample 5 cannot be read: OSError: truncated file"
    ) as caught:
        list(loader.run(lambda: [MicroBatchPlan((4, 5, 6), 0, False)]))
    assert "data.on_error=skip" in str(caught.value)
    left = [process for process in worker_deaths._workers if process.is_alive() and process.pid not in before]
    assert len(left) == workers, "the error holds them"
    worker_deaths._end_workers()  # as at the exit of the process
    for process in left:
        process.join()
        assert process.exitcode == -signal.SIGKILL


class Faulty(own_tasks.Plain):
    """Reading or preparing sample 5 raises an error."""

    def __init__(self, error, preparing):
        super().__init__()
        self.error, self.preparing = error, preparing

    def train_data(self):
        def fail():
            raise self.error

        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(rows, index):
                return fail() if index == 5 and not self.preparing else index

        return Rows()

    def prepare(self, sample, epoch, training):
        if sample == 5 and self.preparing:
            raise self.error
        return torch.ones(1), torch.ones(1)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("preparing", [True, False])
@pytest.mark.parametrize(
    ("error", "is_of_data"),
    [
        (AttributeError("'NoneType' object has no attribute 'size'"), {True: False, False: False}),
        (KeyError("label"), {True: False, False: False}),
        (RuntimeError("a file ends too early"), {True: False, False: True}),
        (ValueError("no number: 'x'"), {True: True, False: True}),
        (FileNotFoundError("a.png"), {True: True, False: True}),
        (zlib.error("incorrect header"), {True: True, False: True}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_faults_of_code_are_not_blamed_on_the_data(error, is_of_data, preparing, on_error):
    task = Faulty(error, preparing)
    micro_batches = MicroBatches(task.train_data(), task, 0, training=True, on_error=on_error)
    plan = MicroBatchPlan((4, 5, 6), 0, False)
    if is_of_data[preparing] and on_error == "skip":
        ((index, text),) = micro_batches[plan].bad
        assert index == 5
        assert "data.on_error" not in text, "the sample is left out already"
    else:
        with pytest.raises(DataError if is_of_data[preparing] else TrainingError) as caught:
            micro_batches[plan]
        text = str(caught.value)
    assert f"{type(error).__name__}: {error}" in text
    assert f"{__file__}:" in text
    if is_of_data[preparing]:
        assert "sample 5 cannot be read" in text
        assert "Traceback" not in text
    else:
        assert f"{'Task.prepare' if preparing else 'Rows.__getitem__'} failed for sample 5 (Rows[5])" in text
        assert "Traceback" in text
        assert "raise self.error" in text


def test_a_gpu_in_a_forked_worker_is_no_damaged_sample():
    text = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn'"
    task = Faulty(RuntimeError(text), False)
    micro_batches = MicroBatches(task.train_data(), task, 0, training=True, on_error="skip")
    with pytest.raises(TrainingError, match=r"Rows\.__getitem__ uses a GPU in a loader worker") as caught:
        micro_batches[MicroBatchPlan((4, 5, 6), 0, False)]
    assert "data.start_method=spawn" in caught.value.remedy


class FaultyCollate(Faulty):
    def collate(self, samples):
        raise self.error


def test_a_fault_of_collate_names_the_method_and_its_line():
    task = FaultyCollate(KeyError("label"), False)
    micro_batches = MicroBatches(range(8), task, 0, training=True)
    with pytest.raises(TrainingError, match=r"Task\.collate failed for samples 4, 6: KeyError: 'label'") as caught:
        micro_batches[MicroBatchPlan((4, 6), 0, False)]
    assert caught.value.where.startswith(f"{__file__}:")
    assert caught.value.where.endswith("in collate")
    assert "raise self.error" in str(caught.value)
    task.error = OSError(24, "Too many open files")  # of the machine: others explain it
    with pytest.raises(OSError, match="Too many open files"):
        micro_batches[MicroBatchPlan((4, 6), 0, False)]


def test_samples_of_other_shapes_are_no_fault_of_a_line_in_torch():
    data = [torch.ones(2), torch.ones(3)]
    micro_batches = MicroBatches(data, own_tasks.Plain(), 0, training=True)
    with pytest.raises(TrainingError, match=r"^Task\.collate failed for samples 0, 1: RuntimeError: stack expects"):
        micro_batches[MicroBatchPlan((0, 1), 0, False)]


def test_skipped_samples_weigh_nothing_and_are_reported(tmp_path):
    """Training without the broken samples is training on the others: the mean is over those that count."""
    broken = [3, 11, 12, 13]
    settings = runs.config(
        data={"on_error": "skip"}, batch={"global": 40, "micro": 4}, train={"steps": 3}, log={"every_steps": 3}
    )

    torch.manual_seed(0)
    task = own_tasks.FromFiles(40, broken)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    batch = [
        torch.stack(part)
        for part in zip(*(task.files[index] for index in range(40) if index not in broken), strict=True)
    ]
    for _ in range(3):
        optimizer.zero_grad()
        (task.loss(model, batch) / 36).backward()
        optimizer.step()

    for world in (1, 2):
        for weights, results in run_ranks(
            world, runs.fit_kind, "FromFiles", {"length": 40, "broken": broken}, settings, None
        ):
            assert runs.difference(weights, model.state_dict()) < 1e-10
            assert results["data/bad"] == 3 * len(broken)
    Trainer(settings, run_dir=tmp_path, quiet=True).fit(own_tasks.FromFiles(40, broken))
    log = (tmp_path / "train.log").read_text()
    assert all(f"folder/{index:03d}.png" in log for index in broken)


def test_micro_batch_of_nothing_but_bad_samples_becomes_a_filler():
    task = own_tasks.FromFiles(8, broken=[2, 3])
    micro_batches = MicroBatches(task.train_data(), task, 0, training=True, on_error="skip")
    micro = micro_batches[MicroBatchPlan((2, 3), 0, False)]
    assert micro.filler
    assert micro.samples == 0
    assert [index for index, _ in micro.bad] == [2, 3]


def test_data_without_any_readable_sample_is_an_error():
    task = own_tasks.FromFiles(5, broken=range(5))
    with pytest.raises(LockstepError, match="none of"):
        MicroBatches(task.train_data(), task, 0, training=True, on_error="skip")[MicroBatchPlan((2,), 0, False)]


def test_a_run_is_freed_at_its_end_without_a_garbage_collection(tmp_path):
    """It holds the evaluation's loader, whose workers would live on."""
    # The first optimizer of a process imports this. Inside, torch keeps an exception, and with it all frames above.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.disable()
    try:
        Trainer(runs.config(train={"steps": 2}), run_dir=tmp_path, quiet=True).fit(own_tasks.Plain())
        assert not any(isinstance(found, Run) for found in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.cases("True")
@pytest.mark.parametrize("training", [True, False])
def test_workers_of_a_training_stay_and_those_of_an_evaluation_end_with_it(training):
    task = own_tasks.Plain(24)
    loader = Loader(MicroBatches(task.train_data(), task, 0, training=training), 2, CPU, ahead=1)
    assert loader.batches.prefetch_factor == 1
    seen = []
    for _ in range(2):
        before = set(multiprocessing.active_children())
        with contextlib.closing(loader.run(lambda: [MicroBatchPlan((n,), 0, False) for n in range(4)])) as batches:
            next(batches)
            seen.append(set(multiprocessing.active_children()) - before)
            assert len(list(batches)) == 3
        left = seen[-1] & set(multiprocessing.active_children())
        assert len(left) == (2 if training and len(seen) == 1 else 0)
    assert len(seen[0]) == 2
    assert len(seen[1]) == (0 if training else 2)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("what", ["killed", "busy"])
def test_workers_that_an_iteration_left_unusable_are_replaced(what):
    """torch's DataLoader raises if its workers do not answer in time when the next iteration begins."""
    task, told = Slow(6, seconds=1.0 if what == "busy" else 0.0), []
    loader = Loader(MicroBatches(task.train_data(), task, 0, training=True), 2, CPU)
    loader.tell = told.append
    plans = [MicroBatchPlan((n,), 0, False) for n in (*range(4), 6, 7)]
    with contextlib.closing(loader.run(lambda: plans)) as batches:
        next(batches)  # the workers are about to prepare the slow sample
    if what == "killed":
        for process in worker_deaths.newest(2):
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    again = list(loader.run(lambda: plans[:3]))
    assert [one.samples for one in again] == [1, 1, 1]
    assert len(told) == (what == "killed")
    assert all("was killed by SIGKILL" in text and "workers are started again" in text for text in told)


# ---- workers that are killed


class Slow(own_tasks.Plain):
    """One sample takes some seconds."""

    def __init__(self, sample, seconds):
        super().__init__(24)
        self.sample, self.seconds = sample, seconds

    def train_data(self):
        return Numbered(super().train_data())

    def prepare(self, sample, epoch, training):
        number, sample = sample
        time.sleep(self.seconds if number == self.sample else 0)
        return sample


class Killed(own_tasks.Dropout):
    """A worker kills itself where it prepares a sample: once, if there is a file to note it."""

    def __init__(self, sample, note=None, training=True):
        super().__init__(eval_length=40)
        self.sample, self.note, self.training = sample, note, training

    def train_data(self):
        data = super().train_data()
        return Numbered(data) if self.training else data

    def eval_data(self):
        data = super().eval_data()
        return data if self.training else Numbered(data)

    def prepare(self, sample, epoch, training):
        if len(sample) == 2:
            number, sample = sample
            if number == self.sample and not (self.note and self.note.exists()):
                if self.note:
                    self.note.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return (sample[0] + torch.rand((), dtype=torch.float64), *sample[1:]) if training else sample


class Numbered(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return index, self.data[index]


@pytest.fixture
def _soon(monkeypatch):
    """A rank looks for dead workers every 5 seconds while it waits for a batch."""
    monkeypatch.setattr(workers, "LOOK_S", 0.1)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_killed_worker_is_named_and_started_again_and_changes_nothing(tmp_path, training):
    settings = runs.config(data={"workers": 2}, train={"steps": 12, "eval_every_steps": 6})
    expected, same = runs.fit(Killed(-1), settings, tmp_path / "whole")
    handler = signal.getsignal(signal.SIGCHLD)
    weights, results = runs.fit(Killed(17, tmp_path / "note", training), settings, tmp_path / "killed")
    assert (tmp_path / "note").exists()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert results["eval/loss"] == same["eval/loss"]
    log = (tmp_path / "killed" / "train.log").read_text()
    assert len(re.findall(r"warning: loader worker \d+ was killed by SIGKILL: workers are started again", log)) == 1
    assert signal.getsignal(signal.SIGCHLD) is handler


@pytest.mark.usefixtures("_soon")
def test_worker_that_is_killed_again_and_again_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(worker_deaths, "MOST_DEATHS", 2)
    task = Killed(5)
    loader = Loader(MicroBatches(task.train_data(), task, 0, training=True), 1, CPU)
    plans = [MicroBatchPlan((number, number + 1), 0, False) for number in range(0, 10, 2)]
    with pytest.raises(DataError, match=r"worker \d+ was killed by SIGKILL, 2 times in a row") as caught:
        list(loader.run(lambda: plans))
    assert caught.value.retryable
    assert re.search(r"samples \[[024], [135]\] and later ones", caught.value.where)
    assert "data.workers" in caught.value.remedy
    assert "[rank 0] warning: loader worker" in capsys.readouterr().err


TASKS = """
import os
import signal
import time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset
from lockstep import Task

class Numbers(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.tensor([float(index)])

class Killed(Task):
    def __init__(self, note, reads=False):
        self.note, self.reads = Path(note), reads
    def model(self):
        return torch.nn.Linear(1, 1)
    def train_data(self):
        if self.reads:
            list(DataLoader(Numbers(), num_workers=1))
        return Numbers()
    def prepare(self, sample, epoch, training):
        if self.note.exists() and epoch == 2:
            self.note.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample
    def loss(self, model, batch):
        time.sleep(0.1)  # a handler of signals that raises does so here
        return model(batch).square().sum()
"""
_KILLED = ("train", "{folder}/tasks.py:Killed", "data.workers=2", "batch.global=10", "train.epochs=4", "log.pictures=0")


def _note(folder):
    (folder / "one").touch()
    (folder / "two").touch()


@pytest.mark.exhaustive
@launched(
    _note,
    (*_KILLED, "task.note={folder}/one", "--run-dir", "{folder}/run"),
    (*_KILLED, "task.note={folder}/two", "task.reads=true", "--run-dir", "{folder}/run2"),
)
def test_a_worker_that_is_killed_in_the_middle_of_a_step_does_not_end_the_command(launch):
    for result, note in zip(launch.done[1:], ("one", "two"), strict=True):
        assert result.returncode == 0, result.stderr
        assert not (launch.folder / note).exists()
        assert "was killed by SIGKILL: workers are started again" in result.stdout + result.stderr


# ---- pictures


def test_batch_that_is_channels_last_already_is_not_copied():
    task = own_tasks.Plain()
    loader = Loader(MicroBatches(task.train_data(), task, 0, training=True), 0, CPU, channels_last=True)

    def on_device(images):
        return MicroBatch({"images": images}, (0,), 0, None, False, copy=loader.copies.begin).batch["images"]

    ready = torch.zeros(4, 3, 8, 8, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    assert on_device(ready) is ready
    other = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    assert on_device(other).is_contiguous(memory_format=torch.channels_last)


class PlainPictures(own_tasks.Plain):
    def train_data(self):
        return Pictures()


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        picture = torch.full((8, 8, 3), index, dtype=torch.uint8).permute(2, 0, 1)  # height, width, channels in memory
        return picture


def test_workers_keep_the_memory_format_of_a_batch():
    task = PlainPictures()
    loader = Loader(MicroBatches(task.train_data(), task, 0, training=True), 1, CPU, channels_last=True)
    (micro_batch,) = loader.run(lambda: [MicroBatchPlan((0, 1, 2), 0, False)])
    assert micro_batch.batch.is_contiguous(memory_format=torch.channels_last)
    assert micro_batch.batch[:, 0, 0, 0].tolist() == [0, 1, 2]


class Endless(own_tasks.FromFiles):
    """Samples that take for ever. The worker writes its process id."""

    def __init__(self, file):
        super().__init__(24)
        self.file = file

    def prepare(self, sample, epoch, training):
        self.file.write_text(str(os.getpid()))
        while True:
            signal.pause()


def read_for_ever(file):
    task = Endless(file)
    loader = Loader(MicroBatches(task.train_data(), task, 0, training=True), 1, CPU)
    next(StepIterator(loader, StepPlan(24, 8, 8, 1), ranks=range(1), start=0, stop=1))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_workers_end_with_a_rank_that_is_killed_also_within_a_sample(tmp_path):
    """They have the rank's files open, and with them the memory of its GPU."""
    file = tmp_path / "worker"
    rank = multiprocessing.get_context("fork").Process(target=read_for_ever, args=(file,))
    rank.start()
    wait_for(lambda: file.exists() and file.read_text())
    rank.kill()
    rank.join()
    wait_for(lambda: not is_running(int(file.read_text())))
