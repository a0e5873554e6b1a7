"""What train.log tells of starts, warnings and evaluations."""

import pytest

from lockstep.core.writer import RunInfo
from lockstep.parts.writers.text_log import TextLog
from lockstep_lab.report import timeline, train_log
from packages.lab.tests.report.cases import LOG, REPORT, TIME


def read(tmp_path, *log):
    (tmp_path / "train.log").write_text("\n".join(log) + "\n")
    return train_log.read(tmp_path / "train.log")


def test_each_start_says_from_where_to_where(tmp_path):
    log = read(tmp_path, *LOG)
    assert [(start.from_step, start.reached, start.goal) for start in log.starts] == [(0, 12, 20), (10, 20, 20)]
    assert [start.seconds for start in log.starts] == [3, 11]
    assert [start.is_complete for start in log.starts] == [False, True]
    killed, complete = timeline.endings(log.starts)
    assert killed.startswith("the log ends without a reason")
    assert killed.endswith("2 steps repeated")
    assert complete == "complete"


def test_the_first_line_that_a_writer_writes_is_a_start(tmp_path):
    for world in (1, 2):
        run = RunInfo("x", tmp_path / str(world), 0, 9, world, "cpu", config={})
        run.folder.mkdir()
        TextLog(run).close()
        assert [start.world for start in train_log.read(run.folder / "train.log").starts] == [world]
    assert " 1 rank on cpu" in (tmp_path / "1" / "train.log").read_text()


@pytest.mark.parametrize(
    ("line", "ending", "complete"),
    [
        ("stopped by SIGTERM at step 15 of 20, saved", "stopped by SIGTERM at step 15 of 20, saved", False),
        ("stopped by SIGINT before the first step", "stopped by SIGINT before the first step", False),
        ("the training ended at step 12 of 20: no better", "the training ended at step 12 of 20: no better", True),
        ("something else", "is running or was killed", False),
    ],
)
def test_how_a_start_ended(tmp_path, line, ending, complete):
    log = read(tmp_path, *LOG[:4], f"{TIME.format(7)}  {line}")
    assert timeline.endings(log.starts) == [ending]
    assert log.starts[0].is_complete is complete


def test_equal_warnings_are_one_with_a_count(tmp_path):
    (note,) = read(tmp_path, *LOG).notes
    assert (note.text, note.count, note.at) == ("warning: the disk is slow", 2, TIME.format(10))


def test_the_report_before_an_evaluation_is_its_table(tmp_path):
    assert read(tmp_path, *LOG).tables == {20: REPORT}


def test_the_lines_before_the_first_step_speak_of_the_model(tmp_path):
    assert read(tmp_path, *LOG).intro == ["ConvNet: 98,026 parameters"]


@pytest.mark.parametrize("log", [[""], ["no time"], [LOG[-1]], [f"{TIME.format(0)}  "], ["\x00\x00"]])
def test_other_files_have_no_starts(tmp_path, log):
    assert read(tmp_path, *log).starts == []


def test_times_that_are_none_take_no_seconds(tmp_path):
    log = read(tmp_path, LOG[0].replace("03-04", "99-99"), LOG[2])
    assert log.starts[0].seconds == 0.0
    assert timeline._picture(log.starts) == ""
