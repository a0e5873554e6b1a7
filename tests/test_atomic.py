"""A file or folder is there whole or as it was, whatever happens while it is written."""

import os
import signal
import subprocess
import sys

import pytest

from lockstep.core import atomic

KILLED = """
import os, signal, sys
from pathlib import Path
from lockstep.core import atomic

path, kind = Path(sys.argv[1]), sys.argv[2]
with getattr(atomic, kind)(path) as staging:
    (staging / "inner" if kind == "staged_folder" else staging).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def fail(path):
    path.write_text("half")
    raise KeyboardInterrupt


@pytest.mark.parametrize("before", ["old", None])
def test_file_is_replaced_or_stays_as_it_was(tmp_path, before):
    path = tmp_path / "file"
    if before:
        path.write_text(before)
    with pytest.raises(KeyboardInterrupt), atomic.staged_file(path) as staging:
        fail(staging)
    assert [file.read_text() for file in tmp_path.iterdir()] == ([before] if before else [])
    atomic.write_text(path, "größer")
    assert [file.read_text(encoding="utf-8") for file in tmp_path.iterdir()] == ["größer"]


@pytest.mark.parametrize("replace", [False, True])
def test_folder_is_replaced_only_if_asked_and_leaves_nothing_else(tmp_path, replace):
    folder = tmp_path / "folder"
    with pytest.raises(KeyboardInterrupt), atomic.staged_folder(folder) as staging:
        fail(staging / "inner")
    assert list(tmp_path.iterdir()) == []
    with atomic.staged_folder(folder) as staging:
        (staging / "old").write_text("whole")
    try:
        with atomic.staged_folder(folder, replace=replace) as staging:
            (staging / "new").write_text("whole")
    except OSError:
        assert not replace
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "new" if replace else "old"]


@pytest.mark.parametrize("kind", ["staged_file", "staged_folder"])
def test_a_killed_process_leaves_nothing_of_that_name_and_the_next_one_clears_up(tmp_path, kind):
    path = tmp_path / "result"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path), kind]).returncode == -signal.SIGKILL
    assert not path.exists()
    with getattr(atomic, kind)(path) as staging:
        (staging / "other" if kind == "staged_folder" else staging).write_text("whole")
    assert [found.name for found in tmp_path.iterdir()] == ["result"]
    assert [found.name for found in path.iterdir()] == ["other"] if path.is_dir() else path.read_text() == "whole"


def test_content_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = []

    def fsync(handle):
        synced.append((os.path.basename(os.readlink(f"/proc/self/fd/{handle}")), (tmp_path / "file").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    atomic.write_text(tmp_path / "file", "text")
    assert synced == [(".file.new", False)]
    synced.clear()
    with atomic.staged_folder(tmp_path / "folder") as staging:
        (staging / "inner").write_text("text")
    assert synced == [("inner", True), (".folder.new", True), (tmp_path.name, True)]
