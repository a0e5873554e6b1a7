"""`lockstep report` and `lockstep compare`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Debug, Force
from lockstep.cli.reporting import FAILED, reporting
from lockstep.core.errors import UsageError
from lockstep.core.user_files import check_replaceable

Folder = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run, complete or not.")]
Folders = Annotated[list[Path], typer.Argument(metavar="RUN_DIR", help="Directories of two runs or more.")]


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
    run_dirs: Folders,
    out: Annotated[Path | None, typer.Option(help="Write an HTML file with the curves, too.")] = None,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Compare runs: what differs in configs and results. Each run is compared with the first."""
    with reporting(debug), _writing(_file(out) or Path()):
        from lockstep_lab.report import comparison, page

        check_replaceable(out, force=force, mark=page.MARK)
        print(comparison.compare(run_dirs, out))
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
