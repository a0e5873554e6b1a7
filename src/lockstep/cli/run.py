"""`lockstep run`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import Cold, Debug
from lockstep.cli.reporting import reporting
from lockstep.core import caller, this_process

_MODULES = ("lockstep.trainer.user_loop", "lockstep.trainer.local_ranks")


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT [ARGS]...", help="Your script, then its own arguments.")],
    nproc: Annotated[str, typer.Option("--nproc", help="Ranks on this machine; auto: one per GPU.")] = "1",
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts of killed or crashed ranks.")] = 3,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Run a script with a lockstep.Loop on several ranks. The same command resumes it."""
    with reporting(debug):
        from lockstep.core.errors import UsageError
        from lockstep.core.parallel import signals
        from lockstep.trainer import local_ranks

        if not Path(script).is_file():
            remedy = "give the path of your script, after the options: lockstep run --nproc 2 train.py --lr 0.1"
            raise UsageError("there is no such file", where=script, remedy=remedy)
        arguments = [script, *context.args]
        local_ranks.check_nproc(nproc)
        if this_process.is_rank() or nproc == "1":
            run_script(arguments)
            return
        with signals.listening():
            from lockstep.launch import launcher

            ranks = local_ranks.ranks_of(nproc)
            launcher.prepare(ranks, cold=cold, modules=_MODULES)
            launcher.launch([*(["--debug"] if debug else []), *arguments], ranks, max_restarts, main=run_rank)


def run_rank(arguments: Sequence[str]) -> None:
    """The main function of a rank: the script."""
    debug = arguments[0] == "--debug"
    try:
        with reporting(debug):
            run_script(arguments[debug:])
    except typer.Exit as ended:
        sys.exit(ended.exit_code)


def run_script(arguments: Sequence[str]) -> None:
    """Run a script as `python SCRIPT ARGS` does. An error of it ends its loops, so that other ranks learn of it."""
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    try:
        with caller.script():
            runpy.run_path(arguments[0], run_name="__main__")
    except BaseException as error:
        from lockstep.trainer import user_exit

        found = user_exit.fail_open(error)
        if isinstance(found, SystemExit):
            raise typer.Exit(found.code if isinstance(found.code, int) else int(found.code is not None)) from None
        if found is error:
            raise
        raise found from error
    from lockstep.trainer import user_exit

    user_exit.close_open()
