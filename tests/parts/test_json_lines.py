"""metrics.jsonl: JSON, one object a line, and damage to a line spoils no other line."""

import json
import os

import pytest

from lockstep.core import atomic
from lockstep.parts.json_lines_file import JsonLinesFile

GOOD = [b'{"step": 5}\n', b'{"step": 10}\n']


def resumed(path, content, at=10):
    path.write_bytes(content)
    file = JsonLinesFile(path, last_step=at)
    file.append({"step": 11})
    file.close()
    return path.read_bytes(), file.note


def test_entries_after_the_resumed_step_are_dropped(tmp_path):
    content, note = resumed(tmp_path / "metrics.jsonl", b"".join([*GOOD, b'{"step": 15}\n']))
    assert content == b"".join([*GOOD, b'{"step": 11}\n'])
    assert note == ""


def test_nothing_is_dropped_before_the_first_entry(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join([*GOOD, b'{"step": 15}\n', b"damaged"]))
    before = path.read_bytes()
    JsonLinesFile(path, last_step=5).close()
    assert path.read_bytes() == before


def test_an_evaluation_that_is_made_again_replaces_the_one_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 5}\n{"step": 10, "train/loss": 1}\n{"step": 10, "eval/loss": 2}\n')
    file = JsonLinesFile(path, last_step=10)
    file.append({"step": 10, "eval/loss": 3})
    file.append({"step": 10, "eval/loss": 4})
    file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("eval/loss") for line in lines] == [None, None, 3, 4]


def test_lines_that_a_full_disk_kept_from_being_dropped_are_dropped_by_the_next_entry(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join([*GOOD, b'{"step": 15}\n']))
    file = JsonLinesFile(path, last_step=10)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "sync", lambda staging: os.stat(tmp_path / "full"))
        with pytest.raises(FileNotFoundError):
            file.append({"step": 11})
    file.append({"step": 12})
    file.close()
    assert path.read_bytes() == b"".join([*GOOD, b'{"step": 12}\n'])


NO_ENTRIES = [
    b"\0\0\n",
    b'\0\0{"step": 7}\n',
    b"\xff\xfe\n",
    b"\n",
    b"[]\n",
    b"3\n",
    b'{"loss": 1}\n',
    b'{"step": "x"}\n',
    b'{"step": null}\n',
    b"[" * 100_000 + b"\n",
    b'{"step": 7}garbage\n',
]
TORN = [b'{"st', b'{"step": 10}', b"\0" * 5000]


@pytest.mark.parametrize(
    ("damage", "place"),
    [*((one, place) for one in NO_ENTRIES for place in (0, 1, 2)), *((one, 2) for one in TORN)],
    ids=lambda value: repr(value)[:14],
)
def test_damaged_line_is_dropped_with_one_message(tmp_path, damage, place):
    content, note = resumed(tmp_path / "metrics.jsonl", b"".join([*GOOD[:place], damage, *GOOD[place:]]))
    assert content == b"".join([*GOOD, b'{"step": 11}\n'])
    assert note == "metrics.jsonl: 1 of 3 lines damaged (by a power cut or a full disk?) and dropped"


def test_whole_file_of_zeros_is_an_empty_one(tmp_path):
    content, note = resumed(tmp_path / "metrics.jsonl", b"\0" * 4096)
    assert content == b'{"step": 11}\n'
    assert "1 of 1 line " in note


def test_numbers_that_are_not_finite_are_null(tmp_path):
    file = JsonLinesFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1, "train/loss": float("nan"), "train/lr": float("inf"), "table": [[1.0, float("-inf")]]})
    file.close()
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 1, "train/loss": null, "train/lr": null, "table": [[1.0, null]]}\n'


def test_line_that_was_torn_by_a_full_disk_spoils_no_other(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    file = JsonLinesFile(path)
    file.append({"step": 1})
    whole = file.file
    file.file = type("Full", (), {"write": lambda self, line: whole.write(line[:4])})()
    with pytest.raises(OSError, match=os.strerror(28)):
        file.append({"step": 2})
    file.file = whole
    file.append({"step": 3})
    file.close()
    assert path.read_text().splitlines() == ['{"step": 1}', '{"st', '{"step": 3}']
    assert [json.loads(line)["step"] for line in resumed(path, path.read_bytes())[0].splitlines()] == [1, 3, 11]
