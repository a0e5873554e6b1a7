"""Series from metrics.jsonl, whatever state the file is in."""

import json
import math

import numpy as np
import pytest

from lockstep_lab.report import metrics_file
from packages.lab.tests.report.cases import entries, entry


def read(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    return metrics_file.read(tmp_path / "metrics.jsonl")


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_each_name_has_its_own_steps(tmp_path):
    metrics = read(tmp_path, lines(*entries(20)))
    assert metrics.entries == 22
    assert metrics.damaged == 0
    assert metrics.series["eval/loss"].steps.tolist() == [10, 20]
    assert metrics.series["train/loss"].values.tolist() == [2 / step for step in range(1, 21)]
    assert metrics.last_step == 20
    assert metrics.last("eval/accuracy") == 0.2
    assert metrics.at("eval/accuracy", 10) == 0.1
    assert metrics.at("eval/accuracy", 11) is metrics.at("none", 10) is None


def test_a_name_that_only_some_entries_have_is_still_one_series(tmp_path):
    rows = [entry(step, a=step, **({"b": 1} if step % 3 else {})) for step in range(1, 10)]
    assert read(tmp_path, lines(*rows)).series["a"].values.tolist() == list(range(1, 10))


def test_more_rows_than_a_block_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "_BLOCK", 7)
    metrics = read(tmp_path, lines(*(entry(step, a=step) for step in range(1, 101))))
    assert metrics.series["a"].values.tolist() == list(range(1, 101))


def test_half_a_line_and_other_damage_is_counted_and_left_out(tmp_path):
    bad = [
        '{"epoch": 1}\n',
        "[1, 2]\n",
        "\x00\x00\n",
        '"step"\n',
        '{"step": "a"}\n',
        '{"step": -1}\n',
        "[" * 100_000 + "\n",
    ]
    good = lines(*entries(10))
    metrics = read(tmp_path, good + "".join(bad) + "\n" + '{"step": 11, "train/lo')
    assert metrics.entries == 11
    assert metrics.damaged == len(bad) + 1
    assert metrics.last_step == 10


@pytest.mark.parametrize("value", [None, "text", [1, 2], {"a": 1}, math.inf, 10**400])
def test_what_is_no_finite_number_is_nan(tmp_path, value):
    metrics = read(tmp_path, lines(entry(1, a=1.0), entry(2, a=value), entry(3, a=3.0)))
    assert np.isnan(metrics.series["a"].values).tolist() == [False, True, False]
    assert metrics.at("a", 2) is None
    assert metrics.last("a") == 3.0


def test_of_two_entries_of_a_step_the_later_stays(tmp_path):
    """A run that was restarted by something that does not cut the file."""
    rows = [entry(1, a=1), entry(2, a=2), entry(3, a=3), entry(2, a=20), entry(3, a=30)]
    series = read(tmp_path, lines(*rows)).series["a"]
    assert series.steps.tolist() == [1, 2, 3]
    assert series.values.tolist() == [1, 20, 30]


def test_time_that_goes_back_is_a_restart(tmp_path):
    rows = [{"step": step, "time_s": time} for step, time in [(1, 1.0), (2, 2.5), (3, 0.5), (4, 1.5), (5, 0.25)]]
    metrics = read(tmp_path, lines(*rows))
    assert metrics.restarts() == [(2, 3), (4, 5)]
    assert metrics.trained_s() == 2.5 + 1.5 + 0.25


def test_a_start_whose_clock_does_not_go_back_counts_too(tmp_path):
    """Killed after step 5, and went on from step 3: later entries were dropped. The second start began slowly."""
    rows = [{"step": step, "time_s": time} for step, time in [(2, 1.0), (3, 1.5), (4, 4.0), (5, 4.5)]]
    metrics = read(tmp_path, lines(*rows))
    assert metrics.restarts() == []
    assert metrics.trained_s() == 4.5
    assert metrics.trained_s([3]) == 1.5 + 4.5
    assert metrics.trained_s([0, 0, 3, 3, 5]) == 1.5 + 4.5  # nothing is left of a start, or it has no entry yet
    assert metrics.trained_s([1, 2, 4]) == 1.0 + 4.0 + 4.5


@pytest.mark.parametrize("text", ["", "\n", '{"step": 1}\n', "half"])
def test_a_file_without_numbers_has_no_series(tmp_path, text):
    metrics = read(tmp_path, text)
    assert metrics.series == {}
    assert metrics.last_step is None
    assert metrics.restarts() == []
    assert metrics.trained_s() == 0.0


def test_a_missing_file_has_no_series(tmp_path):
    assert metrics_file.read(tmp_path / "metrics.jsonl").series == {}
