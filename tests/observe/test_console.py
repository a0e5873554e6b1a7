"""What a person sees: lines anywhere, a bar on a terminal only."""

import io

from rich.console import Console

from lockstep.observe.console import ConsoleWatcher
from lockstep.observe.jsonl import JsonLines
from lockstep.observe.textlog import line

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
    watcher = ConsoleWatcher(100, console=Console(file=output, force_terminal=terminal, width=120, highlight=False))
    watcher.record(ENTRY)
    watcher.progress(70)
    watcher.message("a [warning] about samples")
    watcher.close()
    return output.getvalue()


def test_elsewhere_than_on_a_terminal_there_are_plain_lines():
    text = shown(terminal=False)
    assert text.splitlines() == [line(ENTRY, 100), "a [warning] about samples"]
    assert "\x1b" not in text


def test_on_a_terminal_there_is_a_bar_as_well():
    text = shown(terminal=True)
    assert "training" in text
    assert "70/100" in text


def test_line_is_short_and_leaves_out_what_is_zero_or_per_rank():
    assert line(ENTRY, 100) == "step 50/100  epoch 2.50  loss 0.1235  lr 1e-05  peak MB 300"


def test_entries_after_the_resumed_step_are_dropped_and_so_is_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5}\n{"step": 10}\n{"step": 15}\n{"st')
    log = JsonLines(path, resumed_at=10)
    log.record({"step": 11})
    log.close()
    assert path.read_text() == '{"step": 5}\n{"step": 10}\n{"step": 11}\n'
