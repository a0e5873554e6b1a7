"""Starts, interruptions and restarts of a run, and problems on the way."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from lockstep.drawing.markup import Markup, element
from lockstep.parts.ending import duration
from lockstep_lab.report import page, svg
from lockstep_lab.report.page import code, folded, table
from lockstep_lab.report.run import RunSummary
from lockstep_lab.report.train_log import LoggedStart

_MOST = 200  # starts in the table
_WIDTH, _HEIGHT = 1000.0, 46.0


def parts(run: RunSummary) -> list[Markup]:
    """The section on the history of the run."""
    starts = run.log.starts
    content: list[Markup] = []
    if starts:
        content += [_picture(starts, run.is_running), _table(starts, run.is_running)]
    else:
        jumps = [f"between steps {before:,} and {after:,}" for before, after in run.metrics.restarts()]
        text = f"train.log is empty. By metrics.jsonl, the run was restarted {', '.join(jumps)}." if jumps else ""
        content.append(element("p", text or "No start is logged, and metrics.jsonl shows no restart.", class_="soft"))
    content += [folded(f"hang report {name}", code(text)) for name, text in run.hangs]
    if run.log.notes:
        rows = [[page.time(note.at), note.text, str(note.count)] for note in run.log.notes]
        content += [
            element("h3", "Warnings"),
            table(("first time", "message", "times"), rows, "paths", label="Warnings"),
        ]
    return content


def endings(starts: Sequence[LoggedStart], is_running: bool | None = None) -> list[str]:
    """The end of each start, in words.

    Args:
        is_running: whether a process is training; None: unknown.
    """
    said = []
    for start, after in zip(starts, [*starts[1:], None], strict=True):
        lost = start.reached - after.from_step if after is not None else 0
        text = start.ending or (
            "complete" if start.is_complete else "the log ends without a reason: it was killed or failed"
        )
        if after is None and not start.ending and not start.is_complete:
            text = {True: "is running", False: "was killed or failed", None: "is running or was killed"}[is_running]
        again = f"; {lost:,} step{'s' * (lost != 1)} repeated" if lost > 0 else ""
        said.append(text + again)
    return said


def _table(starts: Sequence[LoggedStart], is_running: bool | None) -> Markup:
    rows = []
    for start, ending in list(zip(starts, endings(starts, is_running), strict=True))[-_MOST:]:
        about = f"{start.world} x {start.device}, lockstep {start.lockstep}, torch {start.torch}"
        rows.append(
            [page.time(start.at), f"{start.from_step:,} to {start.reached:,}", duration(start.seconds), ending, about]
        )
    left_out = f" (the last {_MOST} of {len(starts)})" if len(starts) > _MOST else ""
    return table(("started", "steps", "for", f"end{left_out}", "on"), rows, "starts", label="Starts")


def _picture(starts: Sequence[LoggedStart], is_running: bool | None = None) -> Markup:
    """A bar for each start on a time axis; empty if times are missing."""
    try:
        begins = [datetime.datetime.fromisoformat(start.at).timestamp() for start in starts]
        ends = [datetime.datetime.fromisoformat(start.last_at).timestamp() for start in starts]
    except ValueError:
        return Markup()
    first, total = min(begins), max(max(ends) - min(begins), 1.0)
    bars = [svg.rect(0, 20, _WIDTH, 6, class_="base")]
    for start, begin, end, ending in zip(starts, begins, ends, endings(starts, is_running), strict=True):
        left = (begin - first) / total * _WIDTH
        width = max(3.0, (end - begin) / total * _WIDTH)
        about = f"{start.at}: steps {start.from_step} to {start.reached}; {ending}"
        bars.append(svg.rect(left, 12, width, 22, about, class_="ran" if start.is_complete else "lost"))
    label = f"{len(starts)} start{'s' * (len(starts) != 1)} within {duration(total)}"
    picture = svg.drawing(_WIDTH, _HEIGHT, bars, class_="line", aria_label=label, preserveAspectRatio="none")
    return element("div", picture, element("p", f"{label}.", class_="soft"))
