"""`lockstep preflight`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.config import RunConfig
    from lockstep.preflight.judgement import Finding


def add_to(
    app: typer.Typer,
    reporting: Callable[[bool], AbstractContextManager[None]],
    launched: Callable[..., RunConfig | None],
) -> None:
    """Add the command to the application.

    Args:
        reporting: turns exceptions into messages and exit codes.
        launched: reads the config. Where this process is no rank, it starts the ranks, and returns None at their end.
    """

    @app.command(epilog="Example: lockstep preflight digits --nproc 2")
    def preflight(
        target: Annotated[str, typer.Argument(metavar="RECIPE|FILE.yaml|FILE.py:Task", help="What will be trained.")],
        overrides: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the config, by dotted path.")
        ] = None,
        nproc: Annotated[str | None, typer.Option("--nproc", help="Ranks on this machine; auto: one per GPU.")] = None,
        preset: Annotated[str | None, typer.Option("--preset", metavar="NAME|FILE.yaml", help="As for train.")] = None,
        run_dir: Annotated[Path | None, typer.Option(help="As for train.")] = None,
        nnodes: Annotated[
            str | None, typer.Option("--nnodes", metavar="N|MIN:MAX", envvar="LOCKSTEP_NNODES", help="As for train.")
        ] = None,
        rendezvous: Annotated[
            str | None,
            typer.Option("--rendezvous", metavar="HOST[:PORT]", envvar="LOCKSTEP_RENDEZVOUS", help="As for train."),
        ] = None,
        rendezvous_id: Annotated[
            str | None,
            typer.Option("--rendezvous-id", metavar="NAME", envvar="LOCKSTEP_RENDEZVOUS_ID", help="As for train."),
        ] = None,
        wait_for_nodes: Annotated[
            float,
            typer.Option(
                "--wait-for-nodes", metavar="SECONDS", envvar="LOCKSTEP_WAIT_FOR_NODES", min=1, max=31_536_000
            ),
        ] = 60,
        debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of all errors.")] = False,
    ) -> None:
        """Check the machines before a training, and train nothing. Exit code 3: a fault."""
        with reporting(debug):
            options = [*(["--run-dir", str(run_dir)] if run_dir else []), *(["--preset", preset] if preset else [])]
            options += ["--debug"] if debug else []
            arguments = ["preflight", target, *(overrides or []), *options]
            settings = launched(
                arguments,
                target,
                overrides or [],
                nproc=nproc,
                preset=preset,
                run_dir=run_dir,
                nodes=(nnodes, rendezvous, rendezvous_id, wait_for_nodes),
            )
            if settings is None:
                return
            from lockstep.trainer import Trainer

            findings = Trainer(settings, run_dir=run_dir).preflight()
            if os.environ.get("RANK", "0") == "0":
                print(table(findings), flush=True)
            faults = sum(finding.level == "fault" for finding in findings)
            if faults:
                raise _fault(faults)


def _fault(count: int) -> UsageError:
    error = UsageError(f"preflight found {count} fault{'s' * (count > 1)}, see the table above")
    error.exit_code = 3
    return error


def table(findings: list[Finding]) -> str:
    """The findings as lines for a terminal, with the remedies below those that are not right."""
    lines = []
    for finding in findings:
        level = finding.level.upper() if finding.level in ("fault", "warning") else finding.level
        lines.append(f"{level:<8} {finding.check:<14} {finding.what}")
        lines += [f"{'':<23} remedy: {finding.remedy}"] if finding.remedy else []
    return "\n".join(lines)
