"""Profiles of a training: which steps they show, and that they change nothing."""

import json
import time

import pytest
import torch

from lockstep import Trainer
from lockstep.core.errors import UsageError
from lockstep.parts import profile
from tests import own_tasks, runs
from tests.clock import only_sleep_takes_time
from tests.ranks import run_ranks
from tests.selection import mainly


@pytest.mark.parametrize(
    ("text", "window"), [("5-10", (5, 6)), ("7-7", (7, 1)), (" 6 ", (None, 6)), ("1-2", (1, 2)), ("12", (None, 12))]
)
def test_a_window_is_two_steps_or_a_number_of_steps(text, window):
    found = profile.parse(text)
    assert (found.first, found.steps) == window


@pytest.mark.parametrize("text", ["", "0", "10-5", "0-3", "5-", "-5", "a", "1-2-3", "2.5"])
def test_anything_else_is_an_error(text):
    with pytest.raises(UsageError, match="does not name steps"):
        profile.parse(text)


def steps_of(folder, rank=0):
    events = json.loads((folder / "profile" / f"rank{rank}.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    found = sorted(int(name.rsplit(" ", 1)[1]) for name in names if name.startswith("lockstep step "))
    return found, names


def trained(folder, text, **changes):
    """Train, profiled or not. Returns the weights and the results."""
    weights = runs.FinalWeights()
    settings = runs.config(train={"steps": 12}, **changes)
    results = Trainer(settings, run_dir=folder, quiet=True, profile=text).fit(own_tasks.Plain(), weights)
    return weights.tensors, results


@pytest.mark.parametrize(
    ("text", "steps"),
    mainly(
        [("5-10", range(5, 11)), ("12-12", [12])],
        [("5-10", range(5, 11)), ("1-2", range(1, 3)), ("4", range(6, 10)), ("11-20", range(11, 13)), ("12-12", [12])],
    ),
)
def test_trace_has_the_steps_that_were_asked_for(tmp_path, text, steps):
    trained(tmp_path, text)
    found, names = steps_of(tmp_path)
    assert found == list(steps)
    assert "aten::addmm" in names or "aten::linear" in names
    table = (tmp_path / "profile" / "rank0.txt").read_text()
    assert f"steps {steps[0]} to {steps[-1]}" in table
    assert 3 <= sum(" aten::" in f" {line}" for line in table.splitlines()) <= 11
    (line,) = [line for line in (tmp_path / "train.log").read_text().splitlines() if "profile of" in line]
    assert "waits of the host" in line


def test_reads_by_the_host_are_counted(tmp_path):
    class Reading(own_tasks.Plain):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            loss.detach().item(), loss.detach().item()
            return loss

    counts = []
    for name, task in (("plain", own_tasks.Plain()), ("reading", Reading())):
        Trainer(runs.config(train={"steps": 4}, log={"every_steps": 4}), run_dir=tmp_path / name, profile="2-3").fit(
            task
        )
        table = (tmp_path / name / "profile" / "rank0.txt").read_text()
        counts.append(int(table.split("aten::_local_scalar_dense ")[-1].split()[0]) if "_dense" in table else 0)
    assert counts[1] - counts[0] == 2 * 2


def test_a_profile_does_not_change_the_training(tmp_path):
    weights, results = trained(tmp_path / "profiled", "5-10")
    expected, plain = trained(tmp_path / "plain", None)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert results["train/loss"] == plain["train/loss"]
    assert not (tmp_path / "plain" / "profile").exists()


def test_each_rank_writes_a_trace_and_rank_0_the_table(tmp_path):
    run_ranks(2, trained, tmp_path, "3-4")
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["rank0.json", "rank0.txt", "rank1.json"]
    assert steps_of(tmp_path, 1)[0] == [3, 4]


def test_steps_that_are_not_trained_are_a_warning(tmp_path):
    trained(tmp_path, "13-14")
    assert (
        "warning: nothing was profiled, because steps 13 to 14 were not trained" in (tmp_path / "train.log").read_text()
    )
    trained(tmp_path, "2-3")  # the run is complete
    assert "steps 2 to 3 were not trained" in (tmp_path / "train.log").read_text()


def test_steps_that_are_not_trained_prepare_no_profiler(tmp_path, monkeypatch):
    """In torch 2.11, one that is prepared and not started makes the next of the process fail."""
    prepared = []
    monkeypatch.setattr(torch.profiler.profile, "prepare_trace", lambda self: prepared.append(self))
    trained(tmp_path, "13-14")
    assert not prepared


def test_a_profile_that_cannot_be_written_ends_nothing(tmp_path):
    runs.mark(tmp_path)
    (tmp_path / "profile").write_text("in the way")
    assert trained(tmp_path, "2-3")[1]["step"] == 12
    assert "warning: the profile was not written: FileExistsError" in (tmp_path / "train.log").read_text()


def test_a_training_that_fails_leaves_the_profile_of_the_steps_before(tmp_path):
    class Failing(own_tasks.Plain):
        calls = 0

        def loss(self, model, batch):
            self.calls += 1
            if self.calls > 8:
                raise ZeroDivisionError
            return super().loss(model, batch)

    with pytest.raises(ZeroDivisionError):
        Trainer(runs.config(), run_dir=tmp_path, quiet=True, profile="2-18").fit(Failing())
    assert steps_of(tmp_path)[0][0] == 2


def test_the_time_of_the_profiler_is_no_time_of_the_training(tmp_path, monkeypatch):
    before = profile.Profiler._before

    def slow(self, step, apart):
        with apart():
            time.sleep(1000.0)
        before(self, step, apart)

    monkeypatch.setattr(profile.Profiler, "_before", slow)
    settings = runs.config(train={"steps": 12}, log={"every_steps": 4})
    with only_sleep_takes_time():
        Trainer(settings, run_dir=tmp_path, quiet=True, profile="2-3").fit(own_tasks.Plain())
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry.get("train/wait_share", 0.0) for entry in entries] == [0.0, 0.0, 0.0]


class Event:
    def __init__(self, key, host, device, kind="CPU"):
        self.key, self.count, self.self_cpu_time_total, self.self_device_time_total = key, 1, host, device
        self.device_type = type("Kind", (), {"name": kind})


def test_the_device_decides_what_is_slow_where_it_computes():
    events = [Event("aten::mm", 1, 900), Event("aten::item", 500, 0), Event("aten::add", 2, 100)]
    events += [Event("gemm_kernel", 0, 900, "CUDA"), Event("lockstep step 3", 9000, 0)]
    rows = profile.slowest(events)
    assert [(row.name, row.share) for row in rows] == [("aten::mm", 0.9), ("aten::add", 0.1), ("aten::item", 0.0)]
