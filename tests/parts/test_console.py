"""What a person sees: lines anywhere, a bar on a terminal only."""

import io
import subprocess
import sys
import time

from rich.console import Console

from lockstep.parts.entry_line import entry_line
from lockstep.parts.writers.console import ConsoleWriter
from tests.clock import only_sleep_takes_time
from tests.parts.cases import run_info

ENTRY = {
    "step": 50,
    "epoch": 2.5,
    "time_s": 1.0,
    "train/loss": 0.123456,
    "train/lr": 1e-5,
    "train/skipped": 0,
    "memory/peak_mb": 300.0,
    "memory/peak_mb/rank0": 300.0,
}


def shown(terminal):
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120, highlight=False)
    writer = ConsoleWriter(run_info("runs/one", last_step=100), console)
    writer.record(ENTRY)
    writer.progress(70)
    writer.message("a [warning] about samples")
    writer.close()
    return output.getvalue()


def test_elsewhere_than_on_a_terminal_there_are_plain_lines():
    text = shown(terminal=False)
    header = "one: 2 x cpu with 1 thread each, global batch 24, steps 1 to 100, runs/one"
    assert text.splitlines() == [header, entry_line(ENTRY, 100), "a [warning] about samples"]
    assert "\x1b" not in text


def test_on_a_terminal_there_is_a_bar_as_well():
    text = shown(terminal=True)
    assert "training" in text
    assert "70/100" in text


def test_bar_has_the_loss_of_the_last_entry():
    assert "loss 0.1235" in shown(terminal=True)


def writer_on(output):
    console = Console(file=output, force_terminal=False, width=120, highlight=False)
    return ConsoleWriter(run_info("runs/one", last_step=100), console)


def test_the_end_of_a_training_comes_after_the_tables_of_its_last_evaluation():
    output = io.StringIO()
    writer = writer_on(output)
    writer.details("a table")
    writer.record({"step": 100, "epoch": 1.0, "eval/loss": 0.5})
    writer.end("done: 100 steps")
    writer.close()
    assert output.getvalue().splitlines()[-2:] == ["a table", "done: 100 steps"]


def test_the_first_step_is_told_before_the_first_entry_and_later_steps_are_not():
    output = io.StringIO()
    writer = writer_on(output)
    writer.progress(1)
    writer.progress(30)
    writer.record(ENTRY)
    writer.progress(70)
    _, first, entry = output.getvalue().splitlines()
    assert first.startswith("step 1/100  ")
    assert first.endswith(" s after the start")
    assert entry == entry_line(ENTRY, 100)


def test_a_log_that_is_not_a_terminal_has_a_line_a_minute_with_the_time_left():
    output = io.StringIO()
    with only_sleep_takes_time():
        writer = writer_on(output)
        for step in range(1, 7):  # the first step takes longer than the others
            time.sleep(300 if step == 1 else 25)
            writer.progress(step)
        writer.record(ENTRY | {"step": 7})
        time.sleep(59)
        writer.progress(8)
        time.sleep(60)
        writer.progress(100)
    _, *lines = output.getvalue().splitlines()
    assert lines == [
        "step 1/100  300.0 s after the start",
        "step 4/100  6 min 15 s after the start, about 40 min 00 s left",
        entry_line(ENTRY | {"step": 7}, 100),
    ]
    again = io.StringIO()
    with only_sleep_takes_time():
        writer = writer_on(again)
        for step in (1, 2, 3):  # each step takes longer than a minute
            time.sleep(70)
            writer.progress(step)
    assert [line.rpartition("about ")[2] for line in again.getvalue().splitlines()[2:]] == [
        "1 h 54 min left",
        "1 h 53 min left",
    ]


def test_details_of_the_last_evaluation_stand_at_the_end():
    output = io.StringIO()
    writer = writer_on(output)
    for name in ("first", "second"):
        writer.details(f"{name} of clean")
        writer.details(f"{name} of noisy")
        writer.record({"step": 50, "epoch": 1.0, "eval/loss": 1.0})
        writer.record(ENTRY)
    writer.details("of an evaluation that did not end")
    writer.message("memory: little")
    writer.close()
    lines = output.getvalue().splitlines()
    assert lines[-3:] == ["memory: little", "second of clean", "second of noisy"]
    assert "first" not in output.getvalue()


def test_line_is_short_and_leaves_out_what_is_zero_or_per_rank():
    assert entry_line(ENTRY, 100) == "step 50/100  epoch 2.50  loss 0.1235  lr 1e-05  peak MB 300"
    times = {"health/compute_ms": 4.0, "health/compute_ms/rank0": 4.0, "health/slowest_rank": 0}
    assert entry_line(ENTRY | times, 100) == entry_line(ENTRY, 100)  # a warning names a slow rank


def test_reader_that_goes_away_ends_no_training():
    code = """
import sys
from lockstep.parts.factory import open_writers
from tests.parts.cases import run_info
(console,) = open_writers(run_info("runs/one"), [], quiet=False)
for _ in range(3):
    console.message("text")
console.close()
print("trained on", file=sys.stderr)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert errors == "warning: the console cannot be written: Broken pipe; training continues\ntrained on\n"


def test_results_of_many_questions_are_in_the_file_and_not_in_the_line():
    results = {f"eval/{metric}/{name}": 0.5 for metric in ("auc", "f1") for name in "abc"}
    assert "eval/auc/a 0.5  eval/auc/b 0.5" in entry_line(ENTRY | results, 100)
    results |= {"eval/f1": 0.5, "eval/f1/d": 0.5, "eval/loss/one": 0.25, "train/lr/head": 0.125}
    assert entry_line(ENTRY | results, 100).endswith("  eval/f1 0.5  eval/loss/one 0.25  lr/head 0.125")


def test_results_of_many_sets_are_all_in_the_line():
    names = [f"eval/{data}/{result}" for data in ("near", "far") for result in ("loss", "mae", "mse", "samples")]
    details = {f"eval/far/auc/{name}": 0.5 for name in "abcdefg"}
    line = entry_line({"step": 5, "epoch": 1} | dict.fromkeys(names, 1) | details, 10)
    assert line == "step 5/10  epoch 1.00  " + "  ".join(f"{name} 1" for name in names)


def test_line_of_an_evaluation_has_the_memory_around_it():
    memory = {"memory/before_evaluation_mb": 3000.4, "memory/after_evaluation_mb": 12.6, "memory/evaluation_mb": 0.2}
    entry = {"step": 5, "epoch": 1, "eval/loss": 0.5} | memory
    assert entry_line(entry, 10) == "step 5/10  epoch 1.00  eval/loss 0.5  MB before 3,000 after 13 peak +0"


def test_speeds_stand_together_before_counters():
    speeds = {"train/samples_per_s": 8.0, "train/wait_share": 0.25, "data/bad": 3, "train/tflops_per_s": 0.5}
    assert "samples/s 8  wait 25%  TFLOP/s 0.5  " in entry_line(ENTRY | speeds, 100)
    for tflops, text in (
        (0.0123, "GFLOP/s 12.3"),
        (5e-6, "MFLOP/s 5"),
        (2.079e-8, "kFLOP/s 20.79"),
        (300, "TFLOP/s 300"),
    ):
        assert f"  {text}  " in entry_line(ENTRY | {"train/tflops_per_s": tflops, "x": 1}, 100)
