"""`lockstep report` and `lockstep compare`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Debug, Force
from lockstep.cli.reporting import FAILED, reporting
from lockstep.core.errors import UsageError
from lockstep.core.user_files import check_replaceable

Folder = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run, complete or not.")]
Given = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN_DIR... [KEY=VALUE]...",
        help="Directories of two runs or more. With --evaluate: changes to their configs, such as data.eval=other.csv.",
    ),
]


def report(
    run_dir: Folder,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: RUN_DIR/report.html.")] = None,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Write one HTML page of a run: results, curves, images, restarts."""
    with reporting(debug), _writing(_file(out) or run_dir):
        from lockstep_lab.report import page, run_page

        if out is not None or run_dir.is_dir():  # otherwise the error is that there is no such run
            check_replaceable(out or run_dir / "report.html", force=force, mark=page.MARK)

        print(f"written: {run_page.write(run_dir, out)}")


def compare(
    given: Given,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Evaluate the runs again: which is better, with intervals.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write an HTML file with the curves, too.")] = None,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Compare runs: what differs in configs and results. Each run is compared with the first.

    With --evaluate, it says which is better. Runs that differ only in their seed count as one training.
    """
    with reporting(debug), _writing(_file(out) or Path()):
        from lockstep_lab.report import comparison, page

        check_replaceable(out, force=force, mark=page.MARK)
        overrides = [word for word in given if "=" in word and not Path(word).is_dir()]
        if overrides and not evaluate:
            raise UsageError("only an evaluation takes keys", where=overrides[0], remedy="add --evaluate")
        folders = [Path(word) for word in given if word not in overrides]
        if evaluate:
            from lockstep.cli.evaluate import EVALUATION_KEYS
            from lockstep_lab.report import left_out  # imports torch

            evaluated = partial(left_out.of_run, overrides=overrides, keys=EVALUATION_KEYS)
        print(comparison.compare(folders, out, evaluate=evaluated if evaluate else None))
        if out is not None:
            print(f"written: {out}")


def _file(out: Path | None) -> Path | None:
    """`out`, if a file can be written there; checked before a long run is read."""
    if out is None:
        return None
    if out.is_dir():
        raise UsageError("is a folder", where=str(out), remedy=f"name the file: --out {out / 'report.html'}")
    if not out.parent.is_dir():
        raise UsageError("no such folder", where=str(out.parent), remedy="choose another place with --out, or make it")
    return out


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an error of a file into a message that names it."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended: no file is at fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the output, at the exit
        raise typer.Exit(FAILED) from None
    except OSError as error:
        where = str(error.filename or path)
        what = f"cannot be read or written: {error.strerror}"
        raise UsageError(what, where=where, remedy="choose another place with --out") from error


REPORT = JoinedCommand(report, "lockstep report runs/digits")
COMPARE = JoinedCommand(compare, "lockstep compare runs/digits runs/digits-2 --out compare.html")
