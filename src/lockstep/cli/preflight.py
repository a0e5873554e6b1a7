"""`lockstep doctor preflight`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options, ranks
from lockstep.cli.options import Debug, Nproc, Overrides, Preset, Target, as_arguments
from lockstep.cli.reporting import FAULT, is_first, reporting
from lockstep.core import this_process
from lockstep.core.errors import UsageError, number_of

if TYPE_CHECKING:
    from lockstep.launch.preflight.judgement import PreflightFinding


def preflight(
    target: Target,
    overrides: Overrides = None,
    nproc: Nproc = None,
    preset: Preset = None,
    run_dir: Annotated[Path | None, typer.Option(help="Directory of the run, as for train.")] = None,
    nnodes: options.Nnodes = None,
    rendezvous: options.Rendezvous = None,
    rendezvous_id: options.RendezvousId = None,
    wait_for_nodes: options.WaitForNodes = 60,
    env: Annotated[
        bool, typer.Option("--env", help="Show the environment variables of the ranks too, by rank if they differ.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Check all devices, too, as lockstep doctor check-device does.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Check the machines before a training, and train nothing. Exit code 3: a fault."""
    with reporting(debug):
        from lockstep.launch import node_address
        from lockstep.trainer import foreign

        settings = foreign.load(target, overrides or [])
        settings, nproc = ranks.on_machine(settings, preset, nproc, overrides or [])
        several = node_address.several(nnodes, rendezvous) if not this_process.is_rank() else None
        given = as_arguments({"--run-dir": run_dir, "--preset": preset, "--env": env, "--deep": deep, "--debug": debug})
        arguments = ["doctor", "preflight", target, *(overrides or []), *given]
        if several is not None or ranks.is_launcher(nproc):
            run_id = f"{rendezvous_id or (run_dir or Path('runs', settings.name)).resolve().name}-preflight"
            ranks.launch(arguments, nproc, settings, several=several, run_id=run_id, wait_s=wait_for_nodes)
            return
        from lockstep.launch.preflight import variables
        from lockstep.trainer.trainer import Trainer

        trainer = Trainer(settings, run_dir=run_dir)
        findings = trainer.preflight(deep=deep)
        if is_first():
            print(table(findings), flush=True)
            if env:
                print(f"\n{variables.table(trainer.variables)}", flush=True)
        faults = sum(finding.level == "fault" for finding in findings)
        if faults:
            raise _fault(faults)


def _fault(count: int) -> UsageError:
    error = UsageError(f"preflight found {number_of(count, 'fault')}, see the table above")
    error.exit_code = FAULT
    return error


def table(findings: list[PreflightFinding]) -> str:
    """The findings as lines for a terminal, with the remedies below those that are not right."""
    lines, width = [], max([14, *(len(finding.check) for finding in findings)])
    for finding in findings:
        level = finding.level.upper() if finding.level in ("fault", "warning") else finding.level
        lines.append(f"{level:<8} {finding.check:<{width}} {finding.what}")
        lines += [f"{'':<{9 + width}} remedy: {finding.remedy}"] if finding.remedy else []
    return "\n".join(lines)
