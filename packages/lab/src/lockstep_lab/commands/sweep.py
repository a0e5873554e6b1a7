"""`lockstep sweep`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import ranks
from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Debug, Nproc, Overrides, Preset, Target
from lockstep.cli.reporting import FAILED, reporting
from lockstep.core import this_process
from lockstep.core.errors import UsageError

_Grid = Annotated[Path, typer.Argument(metavar="GRID.yaml", help="Keys with their values, the metric, the sampler.")]
_Trials = Annotated[
    int | None, typer.Option("--trials", min=1, help="Trainings in all. Default: the whole grid, else 20.")
]
_Parallel = Annotated[int, typer.Option("--parallel", min=1, help="Trainings at once on this machine.")]
_RunDir = Annotated[Path | None, typer.Option(help="Directory of the sweep. Default: runs/NAME-sweep.")]
_TRIALS = 20


def sweep(
    target: Target,
    grid: _Grid,
    overrides: Overrides = None,
    trials: _Trials = None,
    parallel: _Parallel = 1,
    nproc: Nproc = None,
    preset: Preset = None,
    run_dir: _RunDir = None,
    debug: Debug = False,
) -> None:
    """Train with different values of some keys, and find the best. The same command resumes the sweep after a kill.

    Each trial is a run in DIR/trial-0000, DIR/trial-0001 and so on.
    """
    with reporting(debug):
        if this_process.is_rank():
            remedy = "leave torchrun out, and give --nproc"
            raise UsageError("starts the ranks of its trials itself", where="lockstep sweep", remedy=remedy)
        from lockstep.trainer import foreign
        from lockstep_lab.search import grid as grids
        from lockstep_lab.search import study

        study.module()
        config = foreign.load(target, overrides or [])
        config, nproc = ranks.on_machine(config, preset, nproc, overrides or [])
        found = grids.read(grid, target, overrides or [], config)
        from lockstep.trainer import local_ranks
        from lockstep_lab.search import sweep as sweeps
        from lockstep_lab.search import sweep_page

        most = len(found.combinations()) if found.sampler == "grid" else None
        order = sweeps.SweepRequest(
            target,
            overrides or [],
            config,
            found,
            folder=run_dir or Path("runs", f"{config.name}-sweep"),
            trials=min(trials or most or _TRIALS, most or trials or _TRIALS),
            parallel=parallel,
            ranks=local_ranks.ranks_of(nproc),
            preset=preset,
        )
        tell = functools.partial(print, flush=True)
        with sweeps.claimed(order):
            running = sweeps.Sweep(order, tell=tell)
            try:
                running.run()
            finally:
                results = sweep_page.ranked(order, running.study)
                if results.records:
                    files = sweep_page.write(results)
                    tell(f"\n{sweep_page.table(results)}\n\nwritten: {', '.join(map(str, files))}")
            if results.best is None:
                raise typer.Exit(FAILED)
            tell(f"train the best: {sweep_page.command(results)}")


COMMAND = JoinedCommand(sweep, "lockstep sweep digits grid.yaml --trials 20 --parallel 2")
