"""`lockstep doctor check-device`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import options, ranks
from lockstep.cli.options import Debug, Force, Nproc, as_arguments
from lockstep.cli.preflight import table
from lockstep.cli.reporting import FAULT, is_first, reporting, write_file
from lockstep.core import this_process
from lockstep.core.errors import UsageError
from lockstep.core.user_files import check_replaceable


def check_device(
    nproc: Nproc = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Time for operations; each runs at least twice. Minutes find rare faults.")
    ] = 20.0,
    memory: Annotated[
        float, typer.Option(min=0.0, max=0.95, help="Share of a GPU's free memory to test with patterns.")
    ] = 0.5,
    device: Annotated[str, typer.Option(help="Device to check: auto, cpu, cuda or mps.")] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the reports of all ranks into this file, too.")
    ] = None,
    force: Force = False,
    nnodes: options.Nnodes = None,
    rendezvous: options.Rendezvous = None,
    rendezvous_id: options.RendezvousId = None,
    wait_for_nodes: options.WaitForNodes = 60,
    debug: Debug = False,
) -> None:
    """Compare what devices compute and keep with known answers. Exit code 3: a device differs."""
    with reporting(debug):
        from lockstep.configs import config_file
        from lockstep.launch import node_address

        check_replaceable(json_file, force=force)
        if not math.isfinite(seconds):
            raise UsageError("it is not a time", where=f"--seconds {seconds}", remedy="give seconds, such as 600")
        config = {"name": "check-device", "device": device}
        settings, count = ranks.on_machine(config_file.parse(config, needs_task=False), None, nproc)
        several = node_address.several(nnodes, rendezvous) if not this_process.is_rank() else None
        if several is not None or ranks.is_launcher(count):
            given = {"--seconds": str(seconds), "--memory": str(memory), "--device": device, "--json": json_file}
            arguments = ["doctor", "check-device", *as_arguments(given | {"--force": force, "--debug": debug})]
            run_id = rendezvous_id or "check-device"
            ranks.launch(arguments, count, settings, several=several, run_id=run_id, wait_s=wait_for_nodes)
            return
        from lockstep.core.parallel.world import join_world
        from lockstep.launch.device_check import judgement, run

        with join_world(device) as world:
            reports = run.check(world, seconds=seconds, memory_share=memory)
        if not is_first():
            return
        found = judgement.findings(reports)
        print(table(found), judgement.table(reports), sep="\n\n", flush=True)
        if json_file is not None:
            write_file(json_file, json.dumps([asdict(report) for report in reports], indent=1))
        faults = [finding for finding in found if finding.level == "fault"]
        if faults:
            error = UsageError(f"{len(faults)} known answers were wrong, see the table above")
            error.exit_code = FAULT
            raise error
