"""`lockstep checkpoints`."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.options import Debug, RunDir
from lockstep.cli.reporting import FAULT, reporting


def checkpoints(
    run_dir: RunDir,
    check: Annotated[bool, typer.Option("--check", help="Read every file and compare it with its checksum.")] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Delete checkpoints that the run's config does not keep, but never the newest valid checkpoint.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """List the checkpoints of a run. With --check, the exit code is 3 if a checkpoint is damaged."""
    with reporting(debug):
        from lockstep.configs import config_file

        settings = config_file.read_run(run_dir)
        from lockstep.cli import inventory

        if not inventory.show(run_dir / "checkpoints", settings.checkpoint, check, prune):
            raise typer.Exit(FAULT)
