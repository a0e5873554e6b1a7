"""Runs beside each other, on the terminal and as a page."""

import pytest

from lockstep.core.errors import UsageError
from lockstep_lab.report import comparison
from lockstep_lab.report.config_difference import differing, flat
from packages.lab.tests.report.cases import NASTY, Page, entry, write_run


@pytest.fixture
def two(tmp_path):
    one = write_run(
        tmp_path / "one", rows=[entry(1, **{"train/loss": 2.0, "eval/f1": 0.5}), entry(2, **{"eval/f1": 0.25})]
    )
    other = write_run(
        tmp_path / "two", rows=[entry(1, **{"train/loss": 1.0, "eval/f1": 0.5})], optim={"lr": 0.2, "x": None}
    )
    return [one, other]


def test_configs_become_dotted_keys():
    assert flat({"a": {"b": {"c": 1}, "d": [{"e": 2}]}, "f": {}}) == {"a.b.c": 1, "a.d": [{"e": 2}], "f": {}}
    assert differing([{"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}]) == {"a.c": [2, 3]}
    assert differing([{"a": 1}, {}]) == {"a": [1, None]}


def test_the_terminal(two):
    lines = [line.split() for line in comparison.compare(two).splitlines()]
    assert ["optim.lr", "0.1", "0.2"] in lines
    assert ["train/loss", "2", "1", "(-1,", "-50.0%)"] in lines
    assert ["eval/f1", "0.25", "0.5", "(+0.25,", "+100.0%)"] in lines  # the last value of each
    assert not any(line[:1] == ["task.kind"] for line in lines)


def test_the_page(two, tmp_path):
    comparison.compare(two, tmp_path / "compare.html")
    read = Page((tmp_path / "compare.html").read_text(encoding="utf-8"))
    assert read.row("optim.lr") == ["optim.lr", "0.1", "0.2"]
    (chart,) = (chart for chart in read.data["charts"] if chart["title"] == "eval/f1")
    assert chart["labels"] == ["one", "two"]
    assert chart["tables"] == [[[1, 2], [0.5, 0.25]], [[1], [0.5]]]


def test_the_best_value_of_the_metric_that_chooses(tmp_path):
    rows = [entry(step, **{"eval/accuracy": value}) for step, value in [(1, 0.5), (2, 0.25), (3, 0.75)]]
    folders = [write_run(tmp_path / name, rows=rows[:count]) for name, count in (("one", 3), ("two", 1))]
    assert comparison.of_runs(folders).best == {"min eval/accuracy": [0.25, 0.5]}


def test_what_differs_in_long_values_is_shown_wherever_it_stands(tmp_path):
    long = "a-long-name-of-a-folder/" * 20
    cases = (
        (f"{long}one.csv", f"{long}two.csv", f"{long}one.csv"),  # at the end
        (f"/one/{long}x.csv", f"/two/{long}x.csv", f"/one/{long}x.csv"),
        (f"{long}one/{long}", f"{long}two/{long}", f"{long}one/{long}"),
        (f"{long}one", long, f"{long}one"),  # of which one ends earlier
        ([long, 1], [long, 2], None),
    )
    for values in cases:
        folders = [tmp_path / str(number) for number in range(3)]
        for folder, value in zip(folders, values, strict=True):
            write_run(folder, data={"train": value})
        compared = comparison.of_runs(folders)
        first, second, third = comparison._values(compared.config["data.train"], 40)
        assert first != second, values
        assert third == ("-" if values[2] is None else first), values
        assert max(map(len, (first, second))) < 60, values
        if "one" in str(values[0]):
            assert ("one" in first, "one" in second) == (True, False), values
        text = comparison.to_text(compared)
        assert first in text
        assert second in text
    assert comparison._values(["a/short/path", None, "b"], 40) == ["a/short/path", "-", "b"]


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path):
    folders = [write_run(tmp_path / parent / "run") for parent in ("a", "b")]
    assert comparison.of_runs(folders).labels == ["a/run", "b/run"]
    assert comparison.of_runs([folders[0]] * 2).labels == ["1: run", "2: run"]


def test_what_a_user_wrote_neither_runs_nor_moves_the_cursor(two):
    folder = write_run(two[0].parent / "nasty", name="n", data={"train": NASTY})
    compared = comparison.of_runs([two[0], folder])
    assert "\x1b" not in comparison.to_text(compared)
    assert len(Page(comparison.to_html(compared)).scripts) == 3


def test_runs_without_anything(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text("")
    text = comparison.compare([tmp_path / "one", tmp_path / "two"], tmp_path / "x.html")
    assert "no key differs" in text
    assert "one: metrics.jsonl is missing" in text


def test_one_run_is_an_error(two):
    with pytest.raises(UsageError, match="only one run"):
        comparison.compare(two[:1])
