"""A rank that waits for its workers says where they are, and how to start them in another way."""

import multiprocessing
import os
import random
import sys
import threading

import numpy as np
import pytest
import torch

from lockstep.core.data import fingerprint, reachable, worker_deaths, worker_memory, worker_stacks, workers
from lockstep.core.data.loader import Loader, MicroBatches
from lockstep.core.data.order import MicroBatchPlan
from lockstep.core.errors import UsageError
from tests import own_tasks

OF_MODULE = np.random.default_rng()
CPU, SHORT_S = torch.device("cpu"), 0.05
linux = pytest.mark.skipif(sys.platform != "linux", reason="stacks are read on Linux alone")


def loader_of(data, count=1, **options):
    return Loader(MicroBatches(data, own_tasks.Plain(), 0, training=True), count, CPU, **options)


def plans(count, size=1):
    return lambda: [MicroBatchPlan(tuple(range(n * size, (n + 1) * size)), 0, False) for n in range(count)]


class Locked(torch.utils.data.Dataset):
    """Takes a lock that a thread of the rank held when the worker was forked, until a file is there."""

    def __init__(self, lock, released):
        self.lock, self.released = lock, released

    def __len__(self):
        return 2

    def __getitem__(self, index):
        while not self.lock.acquire(timeout=SHORT_S):
            if self.released.exists():
                return torch.tensor(index)
        raise AssertionError("the lock was free")


@linux
def test_workers_that_give_nothing_are_shown_with_their_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "LOOK_S", 0.1)
    monkeypatch.setattr(worker_deaths, "REPORT_S", 0.2)
    lock, is_held, ends, said = threading.Lock(), threading.Event(), threading.Event(), []

    def hold():
        with lock:
            is_held.set()
            ends.wait()

    thread = threading.Thread(target=hold, name="holds-the-lock", daemon=True)
    thread.start()
    is_held.wait()
    loader = loader_of(Locked(lock, tmp_path / "released"), start_method="fork")

    def tell(text):
        said.append(text)
        (tmp_path / "released").touch()

    loader.tell = tell
    batches = list(loader.run(plans(2)))
    ends.set()
    assert [batch.indices for batch in batches] == [(0,), (1,)], "the report loses no batch"
    assert "the loader workers have given nothing for" in said[0]
    assert "while samples [0] and later ones were read" in said[0]
    assert f'{__file__}", line ' in said[0]
    assert "in __getitem__" in said[0]
    assert "holds-the-lock" in said[0]
    assert "data.start_method=spawn" in said[0]


@linux
def test_a_process_that_has_no_stack_to_show_is_not_harmed():
    process = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
    process.start()
    assert "it has not begun to read" in worker_stacks.of(process.pid)
    assert process.is_alive()
    process.kill()
    process.join()
    assert "cannot be read" in worker_stacks.of(process.pid)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(1) + index, multiprocessing.get_start_method(allow_none=False), os.getppid()


@pytest.mark.parametrize("method", ["spawn"])
def test_the_start_method_of_workers_changes_no_sample(method):
    found = [batch.collated[0] for batch in loader_of(Numbers(), start_method=method).run(plans(4))]
    expected = [batch.collated[0] for batch in loader_of(Numbers(), 0).run(plans(4))]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Draws(Numbers):
    """From a generator of a module, and of a class, which a new interpreter makes again."""

    generator = random.Random()

    def __getitem__(self, index):
        return torch.tensor([OF_MODULE.random(), self.generator.random()])


def test_generators_of_modules_and_classes_are_seeded_in_workers_that_are_not_forked():
    found = [batch.collated for batch in loader_of(Draws(), start_method="spawn").run(plans(2))]
    expected = [batch.collated for batch in loader_of(Draws(), 0).run(plans(2))]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert fingerprint.digests(Draws(), [0, 3], True, "spawn") == fingerprint.digests(Draws(), [0, 3])


def test_data_that_cannot_be_sent_to_workers_are_named():
    data = Numbers()
    data.held = {"inner": [threading.Lock()]}
    expected = r"data\.start_method=spawn: Numbers\.held\['inner'\]\[0\], a lock, cannot be sent to loader workers"
    with pytest.raises(UsageError, match=expected):
        list(loader_of(data, start_method="spawn").run(plans(1)))


def test_workers_are_not_forked_where_polars_has_threads(monkeypatch):
    assert workers.start_method_for(Numbers()) is None
    monkeypatch.setitem(sys.modules, "polars", object())
    monkeypatch.setattr(worker_stacks, "other_threads", lambda: ["lockstep-watchdog"])
    assert workers.start_method_for(Numbers()) is None
    monkeypatch.setattr(worker_stacks, "other_threads", lambda: ["polars-0"])
    assert workers.start_method_for(Numbers()) == "spawn"
    data = Numbers()
    data.lock = threading.Lock()
    assert not reachable.can_be_sent(data)
    assert workers.start_method_for(data) is None


# ---- memory


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.tensor(int(self.rows[index]["label"]))


@linux
@pytest.mark.parametrize("kind", ["dicts", "array"])
def test_memory_that_workers_copy_is_noted_once(monkeypatch, kind):
    monkeypatch.setattr(worker_memory, "_GROWTH_MB", 4.0)
    monkeypatch.setattr(worker_memory, "_GROWTH", 0.0)
    count = 64 * 1024
    rows = np.zeros(count, dtype=[("label", "i8"), ("path", "U32")])
    if kind == "dicts":
        rows = [{"label": number, "path": f"a folder/of images/{number}.png"} for number in range(count)]
    loader, said = loader_of(Rows(rows)), []
    loader.tell = said.append
    assert len(list(loader.run(plans(512, size=128)))) == 512
    if kind == "array":
        assert said == []
    else:
        (note,) = said
        assert "the memory that a loader worker does not share has grown from" in note
        assert "arrays of NumPy" in note
