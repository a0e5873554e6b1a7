"""`lockstep verify`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import ranks
from lockstep.cli.options import Cold, Debug, Force, Overrides, Preset, Target
from lockstep.cli.reporting import reporting
from lockstep.core import this_process
from lockstep.core.errors import UsageError
from lockstep.core.user_files import check_replaceable
from lockstep.trainer import local_ranks


def verify(
    target: Target,
    overrides: Overrides = None,
    nproc: Annotated[
        str | None,
        typer.Option("--nproc", help="Ranks on this machine; auto: one per GPU. Default: the preset's, or 2."),
    ] = None,
    preset: Preset = None,
    checks: Annotated[str, typer.Option(metavar="A,B,C", help="Which checks; default: all.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Shorter trials.")] = False,
    steps: Annotated[int | None, typer.Option(help="Steps of each comparison. Default: 12, with --quick 8.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where verify.json and verify.html go. Default: runs/NAME.")
    ] = None,
    force: Force = False,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Check that a training is right, on its own model and data. Exit code 3: a fault; 1: nothing could be shown."""
    with reporting(debug):
        from lockstep.recipes import config_file
        from lockstep.trainer import foreign

        settings = config_file.load(target, overrides or [])
        if this_process.is_rank():
            raise UsageError(
                "verify starts its own ranks",
                where="environment variable RANK",
                remedy="call it without torchrun, with --nproc",
            )
        settings, nproc = ranks.on_machine(settings, preset, nproc, overrides or [], default="2")
        count = local_ranks.ranks_of(nproc)
        settings = foreign.settled_alone(settings)
        groups = max(1, count // settings.parallel.tensor)  # of ranks that have the same samples
        settings = settings.model_copy(update={"batch": settings.batch.resolve(groups)})
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: ranks and their files are cleaned up
        if not cold:
            from lockstep.launch import warm_process

            # Otherwise libraries start threads while they are imported, and ranks slow each other down.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            warm_process.start(local_ranks.modules_of(settings))
        from lockstep.trainer import run_directory
        from lockstep.verify import command, report

        names = [name.strip() for name in checks.split(",") if name.strip()]
        folder = run_dir or Path("runs", settings.name)

        for name, mark in command.MARKS.items():
            if folder.is_dir():
                check_replaceable(folder / name, force=force, mark=mark)

        def tell(holder: str) -> None:
            print(f"waiting for {holder}, which verifies in {folder}", file=sys.stderr, flush=True)

        with run_directory.locked(folder, ".verify-lock", tell):  # a second verification would overwrite the same files
            config = settings.model_dump(by_alias=True)
            result = command.verify(config, count, folder, checks=names, quick=quick, steps=steps)
        print(report.summary(result))
        print(f"written: {folder}/verify.json, {folder}/verify.html")
        if result.faults:
            raise typer.Exit(3)
        if result.shows_nothing:
            raise typer.Exit(1)
