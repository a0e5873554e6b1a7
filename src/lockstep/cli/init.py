"""`lockstep init`."""

from __future__ import annotations

import enum
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import Debug, Force
from lockstep.cli.reporting import reporting, write_file
from lockstep.core.errors import UsageError
from lockstep.core.user_files import check_replaceable

_PAGES = "lockstep.migration"
_SKELETON = "task_skeleton.py.txt"


class Library(enum.StrEnum):
    """A library with a migration page."""

    PLAIN = "plain"
    LIGHTNING = "lightning"
    ACCELERATE = "accelerate"
    TRANSFORMERS = "transformers"
    DDP = "ddp"
    FSDP = "fsdp"


def skeleton(file: Path) -> str:
    """The text of a first task, to be written to `file`."""
    return resources.files(_PAGES).joinpath(_SKELETON).read_text(encoding="utf-8").replace("FILE.py", str(file))


def page(library: Library) -> str:
    """The migration page for users of a library, as Markdown."""
    return resources.files(_PAGES).joinpath(f"{library.value}.md").read_text(encoding="utf-8")


def init(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE.py]", help="A new file, for a first task with made-up data.")
    ] = None,
    library: Annotated[
        Library | None,
        typer.Option("--from", help="Show the page for users of another library: their names and ours."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page into this new file.")] = None,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Write a first task, or show how to switch from another library."""
    with reporting(debug):
        if file is None and library is None:
            raise UsageError("nothing to write", where="lockstep init", remedy="give FILE.py, or --from lightning")
        if file is not None and file.suffix != ".py":
            raise UsageError("is not a Python file", where=str(file), remedy=f"call it {file.with_suffix('.py')}")
        if out is not None and library is None:
            raise UsageError("has no meaning without --from", where="--out", remedy="leave it out")
        for path in (file, out):
            check_replaceable(path, force=force)
        if file is not None:
            write_file(file, skeleton(file).removesuffix("\n"))
            print(f"{file}: a first task. Next:")
            print(f"  lockstep train {file}:MyTask --nproc 2 train.epochs=5 train.eval_every_epochs=1")
            print(f"  lockstep verify {file}:MyTask --quick")
        if library is not None and out is not None:
            write_file(out, page(library).removesuffix("\n"))
            print(out)
        elif library is not None:
            print(page(library), end="")
