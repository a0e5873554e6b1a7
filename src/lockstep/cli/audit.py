"""`lockstep audit`: what is silently wrong in a distributed training script of any framework."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import Debug, Force, as_arguments
from lockstep.cli.reporting import reporting
from lockstep.core import this_process
from lockstep.core.errors import UsageError
from lockstep.core.user_files import check_replaceable


def audit(
    context: typer.Context,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Ranks on this machine.")] = 2,
    every: Annotated[int, typer.Option("--every", min=1, help="Look closely at every K-th step.")] = 50,
    patience: Annotated[float, typer.Option("--patience", min=1, help="Seconds without progress: a hang.")] = 60,
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Read a few samples at the end.")] = True,
    format: Annotated[str, typer.Option("--format", metavar="text|json|sarif|github", help="Of the report.")] = "text",
    output: Annotated[Path | None, typer.Option("--output", help="A file for the report.")] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Keep the events in this new folder.")] = None,
    previous: Annotated[Path | None, typer.Option("--previous", help="Events of the run that is resumed.")] = None,
    read: Annotated[Path | None, typer.Option("--read", help="Judge the events of a folder; run no script.")] = None,
    baseline: Annotated[Path | None, typer.Option("--baseline", help="A file of known findings to leave out.")] = None,
    write_baseline: Annotated[Path | None, typer.Option("--write-baseline", help="Write that file.")] = None,
    force: Force = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 for warnings, too.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Why rules were not exercised.")] = False,
    debug: Debug = False,
) -> None:
    """Run SCRIPT ARGS, or -m MODULE ARGS, on several ranks, and name what is silently wrong. Options come first.

    Exit codes: 0 clean, 1 findings, 2 usage, 3 the script failed, 4 a hang, 5 no optimizer step.
    """
    with reporting(debug):
        from lockstep.audit.settings import FORMATS, Settings

        if format not in FORMATS:
            raise UsageError(f"unknown format {format}", where="--format", remedy=f"one of {', '.join(FORMATS)}")
        for path in (output, write_baseline):
            check_replaceable(path, force=force)
        settings = Settings(format, output, previous, baseline, write_baseline, strict, verbose)
        if read is not None:
            from lockstep.audit.judge import judge

            raise typer.Exit(judge(read, settings))
        if this_process.is_rank():
            from lockstep.audit.__main__ import main

            given = as_arguments(
                {"--folder": folder, "--every": every, "--patience": patience, "--no-probe": not probe}
            )
            main([*given, *context.args], settings)
            return
        from lockstep.audit.run import run

        code = run(context.args, settings, nproc=nproc, folder=folder, every=every, patience=patience, probe=probe)
        raise typer.Exit(code)
