"""An error of a writer is shown once, on stderr and by the other writers, and ends no training."""

import os

import pytest

from lockstep.core.writer import Writer
from lockstep.parts.write_guard import WriteGuard, guard_writers
from lockstep.parts.writers.json_lines import JsonLines
from tests.parts.cases import run_info


class Log(Writer):
    """Keeps what it gets; fails at what `fails` names, with an error of its own."""

    def __init__(self, fails=(), error=None):
        self.fails, self.error, self.got = fails, error or OSError(28, os.strerror(28)), []
        self._note("open")

    def _note(self, what, value=None):
        if what in self.fails:
            raise self.error
        self.got.append((what, value))

    def record(self, entry):
        self._note("record", entry["step"])

    def progress(self, step):
        self._note("progress", step)

    def message(self, text):
        self._note("message", text)

    def close(self):
        self._note("close")


def use(logs):
    for log in logs:
        for step in (1, 2):
            log.record({"step": step})
        log.progress(2)
        log.message("text")
        log.close()


EVERYTHING = [("open", None), ("record", 1), ("record", 2), ("progress", 2), ("message", "text"), ("close", None)]


@pytest.mark.parametrize("fails", ["open", "record", "progress", "message", "close"])
@pytest.mark.parametrize("first", [True, False])
def test_log_that_fails_is_told_once_on_stderr_and_in_the_others(capsys, fails, first):
    good = []
    makers = {"good": lambda: good.append(Log()) or good[-1], "bad": lambda: Log(fails)}
    logs = guard_writers(dict(reversed(makers.items())) if first else makers)
    use(logs)
    told = "warning: bad cannot be written: No space left on device; training continues"
    assert capsys.readouterr().err == f"{told}\n"
    assert len(good) == 1
    assert [one for one in good[0].got if one != ("message", told)] == EVERYTHING
    if fails != "close" or first:
        assert good[0].got.count(("message", told)) == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, os.strerror(28)),
        ValueError("I/O operation on closed file"),
        TypeError("x"),
        BrokenPipeError(32, "Broken pipe"),
    ],
)
def test_any_error_is_survived(capsys, error):
    use(guard_writers({"bad": lambda: Log(["record"], error)}))
    assert capsys.readouterr().err.count("warning: bad cannot be written: ") == 1


def test_all_logs_may_fail(capsys):
    use(guard_writers({name: lambda: Log(["open"]) for name in ("one", "other")}))
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"warning: {name} cannot be written: No space left on device; training continues" for name in ("one", "other")
    ]


def test_log_that_cannot_be_opened_is_tried_again(tmp_path, capsys):
    folder = tmp_path / "late"
    (log,) = guard_writers({"metrics.jsonl": lambda: JsonLines(run_info(folder))})
    log.record({"step": 1})
    folder.mkdir()
    log.record({"step": 2})
    log.close()
    assert (folder / "metrics.jsonl").read_text() == '{"step": 2}\n'
    assert capsys.readouterr().err.count("No such file or directory") == 1


def test_request_to_stop_passes_through():
    with pytest.raises(KeyboardInterrupt):
        guard_writers({"bad": lambda: Log(["record"], KeyboardInterrupt())})[0].record({"step": 1})


def test_methods_that_a_writer_does_not_override_do_nothing(capsys):
    use(guard_writers({"plain": lambda: Writer(run_info("."))}))
    assert capsys.readouterr() == ("", "")


def test_note_of_a_writer_is_shown_by_the_others():
    noting, other = Log(), Log()
    noting.note = "two lines were dropped"
    guard_writers({"noting": lambda: noting, "other": lambda: other})
    assert other.got == [("open", None), ("message", "two lines were dropped")]
    assert noting.got == [("open", None)]


def test_guard_warns_once(capsys):
    warnings = []
    guard = WriteGuard("arrays", lambda: Log(["record"], ValueError("odd")), warnings.append)
    for step in range(3):
        guard.record({"step": step})
    assert warnings == ["warning: arrays cannot be written: ValueError: odd; training continues"]
    assert capsys.readouterr().err == f"{warnings[0]}\n"
