"""Which charts there are, and that thinning loses no spike."""

import json

import numpy as np
import pytest

from lockstep_lab.report import charts
from lockstep_lab.report.metrics_file import LoggedMetrics, Series


def series(values, steps=None):
    return Series(np.arange(1.0, len(values) + 1) if steps is None else np.array(steps, float), np.array(values, float))


def metrics(**values):
    return LoggedMetrics({name: one if isinstance(one, Series) else series(one) for name, one in values.items()})


def titles(names, sets=()):
    return {
        chart.title: [line.label for line in chart.lines]
        for chart in charts.of_run(metrics(**{name: [1, 2] for name in names}), sets)
    }


def test_names_that_belong_together_share_a_chart():
    names = ["epoch", "time_s", "train/loss", "train/loss/a", "eval/loss", "eval/samples", "train/lr/x", "train/lr/y"]
    names += [
        "eval/f1",
        "eval/iou/Sky",
        "eval/iou/Car",
        "memory/peak_mb",
        "memory/peak_mb/rank1",
        "memory/optimizer_mb",
    ]
    assert titles(names) == {
        "Loss": ["train/loss", "train/loss/a", "eval/loss"],
        "eval/f1": ["eval/f1"],
        "eval/iou": ["eval/iou/Sky", "eval/iou/Car"],
        "Learning rate": ["train/lr/x", "train/lr/y"],
        "Memory by rank: largest use so far (MiB)": ["memory/peak_mb", "memory/peak_mb/rank1"],
    }


def test_a_result_of_several_evaluation_sets_has_one_chart():
    names = ["eval/clean/f1", "eval/noisy/f1", "eval/clean/loss", "eval/clean/samples"]
    assert titles(names, sets=["clean", "noisy"]) == {"Loss": ["eval/clean/loss"], "eval/f1": names[:2]}


def test_training_evaluation_and_runs_have_the_same_colours_in_all_charts():
    names = [
        "train/loss",
        "eval/loss",
        "train/f1",
        "eval/f1",
        "eval/iou/Sky",
        "eval/iou/Car",
        "train/lr/x",
        "train/lr/y",
    ]
    found = charts.of_run(metrics(**{name: [1, 2] for name in names}))
    colors = {chart.title: [line.color for line in chart.lines] for chart in found}
    assert colors == {
        "Loss": [0, 1],
        "eval/f1": [1],
        "eval/iou": [1, 2],
        "train/f1": [0],
        "Learning rate": [0, 2],
    }
    for chart in charts.data(found):
        assert chart["colors"] == colors[chart["title"]]
    many = charts.of_run(metrics(**{f"{kind}/loss/{n}": [1, 2] for n in range(5) for kind in ("eval", "train")}))
    (loss,) = many
    assert sorted(line.color for line in loss.lines) == list(range(10))
    one, other = metrics(**{"eval/loss": [1, 2]}), metrics(**{"eval/loss": [1, 2], "eval/f1": [1, 2]})
    runs = {chart.title: chart.lines for chart in charts.of_runs({"a": one, "b": other})}
    assert [(line.label, line.color) for line in runs["eval/f1"]] == [("b", 1)]  # and not the colour of run a


def test_counters_that_stay_zero_have_no_chart():
    assert titles(["train/loss"]).keys() == {"Loss"}
    assert [chart.title for chart in charts.of_run(metrics(**{"train/skipped": [0, 0], "data/bad": [0, 1]}))] == [
        "data/bad"
    ]


def test_thinning_keeps_the_smallest_and_the_largest_value_of_every_range():
    draw = np.random.default_rng(0)
    values = draw.normal(size=100_003)
    values[54_321], values[77_777] = 50.0, -50.0
    values[1000:1010] = np.nan
    steps = np.arange(1.0, len(values) + 1)
    thin_steps, thinned, other = charts.thin(steps, [values, steps], buckets=1000)
    assert len(thin_steps) == len(thinned) == len(other) <= 2000
    assert np.all(np.diff(thin_steps) > 0)
    assert (thin_steps[0], thin_steps[-1]) == (1, len(values))
    assert (np.nanmax(thinned), np.nanmin(thinned)) == (50, -50)
    assert abs(thin_steps[np.nanargmax(thinned)] - 54_322) <= 101  # within its range
    size = -(-len(values) // 1000)
    for number in (0, 543, 700):
        block = values[number * size : (number + 1) * size]
        assert {*thinned[2 * number : 2 * number + 2]} == {np.nanmin(block), np.nanmax(block)}
    assert other.tolist() == thin_steps.tolist()  # a line that rises still rises


def test_an_empty_range_stays_empty():
    values = np.ones(3000)
    values[300:600] = np.nan
    _, thinned = charts.thin(np.arange(3000.0), [values], buckets=10)
    assert np.isnan(thinned).tolist() == [False] * 2 + [True] * 2 + [False] * 16


@pytest.mark.parametrize("count", [0, 1, 2, 19, 20])
def test_short_lines_stay_as_they_are(count):
    steps = np.arange(float(count))
    assert [column.tolist() for column in charts.thin(steps, [steps], buckets=10)] == [steps.tolist()] * 2


@pytest.mark.parametrize("count", [21, 29, 31, 41, 1001])
def test_steps_rise_whatever_is_left_for_the_last_range(count):
    steps = np.arange(float(count))
    thin_steps, thinned = charts.thin(steps, [steps], buckets=10)
    assert np.all(np.diff(thin_steps) > 0)
    assert thinned[-1] == thin_steps[-1] == count - 1


def test_the_data_are_strict_json_and_lines_with_the_same_steps_share_them():
    values = metrics(
        **{"train/loss": [1, np.nan, 0.123456789], "train/loss/a": [1, 2, 3], "eval/loss": series([4], [3])}
    )
    (data,) = charts.data(charts.of_run(values))
    assert json.loads(json.dumps(data, allow_nan=False)) == {
        "title": "Loss",
        "labels": ["train/loss", "train/loss/a", "eval/loss"],
        "colors": [0, 2, 1],
        "tables": [[[1, 2, 3], [1, None, 0.123457], [1, 2, 3]], [[3], [4]]],
        "log": True,
    }


def test_many_entries_of_forty_lines_stay_small():
    steps = np.arange(1.0, 100_001)
    values = np.random.default_rng(0).normal(size=len(steps))
    many = LoggedMetrics({f"my/value{number}": Series(steps, values) for number in range(40)})
    shown = charts.of_run(many)
    assert len(json.dumps(charts.data(shown))) < 3_000_000
    assert all(chart.thinned for chart in shown)
