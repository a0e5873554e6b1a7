"""A log on a full disk does not end the training."""

import os

from lockstep.observe.jsonl import JsonLines
from lockstep.observe.steady import Steady


def test_log_that_cannot_be_written_is_told_once(capsys):
    class Full:
        def record(self, entry):
            raise OSError(28, os.strerror(28))

    watcher = Steady(Full())
    for step in range(3):
        watcher.record({"step": step})
    told = capsys.readouterr().err
    assert told.count("warning: Full cannot be written") == 1
    assert "No space left on device; training goes on" in told


def test_everything_else_is_passed_on(tmp_path):
    watcher = Steady(JsonLines(tmp_path / "metrics.jsonl"))
    watcher.record({"step": 1})
    watcher.progress(1)
    watcher.message("text")
    watcher.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
