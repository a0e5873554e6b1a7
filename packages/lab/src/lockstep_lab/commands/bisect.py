"""`lockstep bisect`."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Debug, Force
from lockstep.cli.reporting import FAULT, reporting, tell_first, write_file
from lockstep.core import this_process
from lockstep.core.errors import UsageError
from lockstep.core.user_files import check_replaceable

Run = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run.")]


def bisect(
    run_a: Run,
    run_b: Run,
    until: Annotated[
        int | None, typer.Option(min=1, help="Last step to make again. Default: the first whose log differs.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the answer into this file, too.")] = None,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Name the first step and stage in which two runs differ, and the likely cause. Exit code 3: they differ."""
    with reporting(debug):
        check_replaceable(json_file, force=force)
        if this_process.is_rank():
            raise UsageError("bisect starts its own processes", remedy="call it without torchrun")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: temporary files are deleted
        from lockstep_lab.bisect.bisect import bisect as compared

        verdict = compared((run_a, run_b), tell_first, until)
        print(verdict.sentence)
        if verdict.others:
            print("  also recorded: " + "; ".join(verdict.others[:8]))
        print(f"  next: {verdict.next}", flush=True)
        if json_file is not None:
            write_file(json_file, json.dumps(dataclasses.asdict(verdict), indent=1))
        if verdict.stage:
            raise typer.Exit(FAULT)


COMMAND = JoinedCommand(bisect, "lockstep bisect runs/before runs/after", hidden=True)
