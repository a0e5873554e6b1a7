"""A writer in a process of its own gets the log, cannot stop the training, and ends with it."""

import json
import os
import signal
import time

import pytest

from lockstep.core.errors import UsageError
from lockstep.core.writer import FOLDER
from lockstep.parts.factory import open_writers
from lockstep.parts.own_process import OwnProcess
from lockstep.parts.writer_kinds import find_writer
from tests.parts.cases import run_info
from tests.processes import HANG_S, wait_for

SOURCE = """
import os, time
from lockstep.core.writer import Writer


class Apart(Writer):
    in_own_process = True

    def __init__(self, run):
        super().__init__(run)
        print("hello")
        self.id, goes_on = run.kept_id("apart")
        self.file = (run.folder / "apart.txt").open("a", buffering=1)
        self.file.write(f"{self.id} {goes_on} {os.getpid()}\\n")
        self.note = "look there"

    def record(self, entry):
        if entry["step"] == 13:
            raise OSError(28, "No ink")
        if entry["step"] == 17:
            os._exit(3)
        if entry["step"] == 19:
            time.sleep(900)
        self.file.write(f"record {entry['step']}\\n")

    def picture(self, name, picture, step):
        self.file.write(f"picture {name} {picture} {step}\\n")

    def close(self):
        self.file.write("closed\\n")
"""


@pytest.fixture
def opened(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)

    def opened(first_step=0):
        names = [f"{tmp_path}/mine.py:Apart", "text_log"]
        return open_writers(run_info(tmp_path, first_step), names, quiet=True)

    return opened


def use(writers, steps):
    for writer in writers:
        writer.picture("samples/augmented", [0], 0)
        for step in steps:
            writer.record({"step": step, "epoch": 1.0})


def test_calls_reach_the_process_in_order_and_a_later_start_has_the_same_id(opened, tmp_path, capsys):
    for first in (0, 2):
        writers = opened(first)
        use(writers, (first + 1, first + 2))
        for writer in writers:
            writer.close()
    lines = (tmp_path / "apart.txt").read_text().splitlines()
    assert lines[1:5] == ["picture samples/augmented [0] 0", "record 1", "record 2", "closed"]
    assert lines[6:] == ["picture samples/augmented [0] 0", "record 3", "record 4", "closed"]
    (new, is_old, pid), (again, goes_on, _) = lines[0].split(), lines[5].split()
    assert (new, is_old, goes_on) == (again, "False", "True")
    assert int(pid) != os.getpid()
    assert json.loads((tmp_path / FOLDER / "apart.json").read_text()) == {"id": new}
    assert (tmp_path / FOLDER / "Apart.log").read_text() == "hello\nhello\n"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("steps", "told"),
    [((13, 14), "No ink"), ((17,), "RuntimeError: its process ended with code 3; see {folder}/trackers/Apart.log")],
)
def test_process_that_fails_is_one_warning(opened, tmp_path, capsys, steps, told):
    writers = opened()
    use(writers, steps)
    for writer in writers:
        writer.close()
    warning = f"warning: Apart cannot be written: {told.format(folder=tmp_path)}; training continues"
    assert capsys.readouterr().err == f"{warning}\n"


def test_process_that_hangs_delays_no_step_and_is_ended_after_the_training(opened, tmp_path, capsys):
    writers = opened()
    use(writers[:1], (1, 19, *range(20, 1200)))
    writer = writers[0].writer
    writer.end_s = 0.2
    for one in writers:
        one.close()
    assert writer.process.returncode == -signal.SIGKILL
    err = capsys.readouterr().err
    assert "some calls are dropped" in err or "did not end within 0.2 s" in err


def test_process_ends_when_the_training_is_killed(opened, tmp_path):
    """The system closes the pipe of a killed process. Here the feeding thread gives up."""
    writers = opened()
    use(writers[:1], (1,))
    process = writers[0].writer.process
    while not (tmp_path / "apart.txt").exists() or "record 1" not in (tmp_path / "apart.txt").read_text():
        time.sleep(0.01)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)  # what the launcher, or Ctrl-C, sends to all processes
    process.stdin.close()
    assert process.wait(HANG_S) == 0
    assert (tmp_path / "apart.txt").read_text().endswith("record 1\nclosed\n")
    for writer in writers:
        writer.close()


def test_note_is_shown_by_the_others(opened, tmp_path):
    writers = opened()
    use(writers[:1], (1,))

    def is_shown():
        writers[0].progress(1)
        return "look there" in (tmp_path / "train.log").read_text()

    wait_for(is_shown)
    for writer in writers:
        writer.close()


def test_nothing_is_started_before_the_first_entry(opened, tmp_path):
    (writer, log) = opened()
    writer.picture("samples/augmented", [0], 0)
    assert isinstance(writer.writer, OwnProcess)
    assert writer.writer.process is None
    for one in (writer, log):
        one.close()
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_tracker_without_its_library_is_an_error_that_says_what_to_install(monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"{name} is not installed") as caught:
        find_writer(name)
    assert f"pip install {name}" in caught.value.remedy
