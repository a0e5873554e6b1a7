"""Predictions in a file are those that were made, and an older file outlives what goes wrong."""

import csv
import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.errors import UsageError
from lockstep.trainer import predictions

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=20)
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('",\n\r'), max_size=6)
ROW = st.fixed_dictionaries(
    {
        "text": TEXT,
        "score": st.floats(0, 1),
        "labels": st.lists(TEXT, max_size=2),
        "by": st.dictionaries(TEXT, st.integers(), max_size=2),
    }
)


def from_csv(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def from_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@FIXED
@given(wanted=st.lists(ROW, max_size=4))
def test_json_lines_are_read_back(tmp_path_factory, wanted):
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    predictions.write(path, wanted)
    assert from_lines(path) == wanted


@FIXED
@given(wanted=st.lists(ROW, min_size=1, max_size=4))
def test_csv_is_read_back_with_nested_names_joined_and_lists_as_json(tmp_path_factory, wanted):
    path = tmp_path_factory.getbasetemp() / "rows.csv"
    predictions.write(path, wanted)
    found = from_csv(path)
    assert len(found) == len(wanted)
    for row, one in zip(found, wanted, strict=True):
        assert row.pop("text") == one["text"]
        assert float(row.pop("score")) == one["score"]
        assert json.loads(row.pop("labels")) == one["labels"]
        assert {name: int(value) for name, value in row.items() if value} == {
            f"by/{name}": value for name, value in one["by"].items()
        }


def test_columns_are_in_the_order_of_their_first_row(tmp_path):
    path = tmp_path / "rows.csv"
    predictions.write(
        path, [{"b": 1, "a": {"y": 2, "x": {"deep": "\N{SNOWMAN}"}}}, {"c": ["\N{SNOWMAN}", 1], "b": None}]
    )
    assert path.read_bytes().decode() == 'b,a/y,a/x/deep,c\r\n1,2,\N{SNOWMAN},\r\n,,,"[""\N{SNOWMAN}"", 1]"\r\n'


def test_json_lines_are_for_people_too(tmp_path):
    predictions.write(
        tmp_path / "rows.jsonl",
        [{"text": "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n", "by": {"a": 1}}, {"text": "two\nlines"}],
    )
    assert (tmp_path / "rows.jsonl").read_text(
        encoding="utf-8"
    ) == '{"text": "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n", "by": {"a": 1}}\n{"text": "two\\nlines"}\n'


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_file_that_is_there_is_replaced(tmp_path, name):
    path = tmp_path / name
    for value in ("old and longer", "new"):
        predictions.write(path, [{"text": value}])
    assert (from_csv if name.endswith("csv") else from_lines)(path) == [{"text": "new"}]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, name):
    path = tmp_path / name
    path.write_text("old")

    def full(self, target):
        assert self.stat().st_size  # all that is new is written by now, and not into the old file
        assert path.read_text() == "old"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match="cannot be written: No space left on device") as caught:
        predictions.write(path, [{"text": "new"}])
    assert caught.value.where == f"--out {path}"
    assert "free disk space" in caught.value.remedy
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_fills_up_while_writing_leaves_the_old_file(tmp_path):
    """/dev/full takes nothing: the staged file is a link to it."""
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    (tmp_path / ".rows.jsonl.new").symlink_to("/dev/full")
    with pytest.raises(UsageError, match="No space left on device"):
        predictions.write(path, [{"text": "new"}])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def write_and_fail(path, rows, error=None):
    with predictions.opened(path) as receiver:
        for row in rows:
            receiver.add(row)
        if error is not None:
            raise error


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.npz"])
def test_an_error_of_who_predicts_leaves_the_old_file_and_is_not_about_writing(tmp_path, name):
    path = tmp_path / name
    path.write_text("old")
    with pytest.raises(FileNotFoundError, match="model"):
        write_and_fail(path, [{"text": "new"}], FileNotFoundError("model"))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_is_full_ends_the_prediction_early(tmp_path):
    (tmp_path / ".rows.jsonl.new").symlink_to("/dev/full")
    rows = ({"text": "x" * 100} for _ in range(1000))
    with pytest.raises(UsageError, match="No space left on device"):
        write_and_fail(tmp_path / "rows.jsonl", rows)
    assert len(list(rows)) > 500  # they were not asked for
    assert list(tmp_path.iterdir()) == []


def test_a_table_has_the_columns_of_all_rows_and_waits_in_no_file_with_a_name(tmp_path):
    with predictions.opened(tmp_path / "rows.csv") as rows:
        rows.add({"a": 1.5})
        rows.add({"a": float("nan"), "b": "\ud800"}, readable=False)
        assert [path.name for path in tmp_path.iterdir()] in ([], [".rows.csv.new"])
    assert (tmp_path / "rows.csv").read_bytes() == b"a,b\r\n1.5,\r\nnan,\\ud800\r\n"


@pytest.mark.parametrize("name", ["rows.txt", "rows.jsn", "rows.csv.gz", ".csv"])
def test_another_suffix_is_a_usage_error(tmp_path, name):
    with pytest.raises(UsageError, match="unknown suffix") as caught:
        predictions.check(tmp_path / name)
    assert caught.value.where == f"--out {tmp_path / name}"
    assert caught.value.remedy == "end it with .csv, .json, .jsonl, .npz or .safetensors, or give a folder (no suffix)"


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path, monkeypatch):
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder.csv", tmp_path / "nowhere" / "rows.csv", tmp_path / "file" / "rows.jsonl"):
        with pytest.raises(UsageError, match="cannot be written there") as caught:
            predictions.check(path)
        assert caught.value.where == f"--out {path}"
    predictions.check(tmp_path / "rows.csv")
    predictions.check(tmp_path / "rows.jsonl")
    monkeypatch.setattr(
        os, "access", lambda path, mode: (Path(path), mode) != (tmp_path, os.W_OK)
    )  # root may write anywhere
    with pytest.raises(UsageError, match="cannot be written there"):
        predictions.check(tmp_path / "rows.csv")


def test_checking_writes_nothing(tmp_path):
    predictions.check(tmp_path / "rows.csv")
    assert list(tmp_path.iterdir()) == []
