"""`lockstep replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import joined, ranks
from lockstep.cli.options import Cold, Debug, Force, Nproc, Overrides, as_arguments
from lockstep.cli.reporting import is_first, reporting, tell_first, write_file
from lockstep.core.user_files import check_replaceable

REPLAY_KEYS = ("data.workers", "data.prefetch", "data.start_method", "batch.micro", "device", "parallel", "compute")
"""Keys of a run's config that may be changed: none of them determines the training."""


def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR|BUNDLE", help="Directory of a run, or a bundle.")],
    step: Annotated[
        int | None, typer.Option(min=1, help="The step to repeat, counted as in the log: the first is 1.")
    ] = None,
    overrides: Overrides = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Compute the micro-batches of this rank by themselves, too.")
    ] = None,
    ranks_then: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Number of ranks that trained, with --rank. Default: as many as now."),
    ] = None,
    samples: Annotated[
        bool, typer.Option("--samples", help="Show the samples of the step, by their loss and gradient norm.")
    ] = False,
    debugger: Annotated[
        bool, typer.Option("--debugger", help="Stop in Python's debugger before the step, on one rank.")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(help="Write a trace of the step into this new file, NAME.json.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers into this file, too.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run the code in a bundle.")] = False,
    force: Force = False,
    nproc: Nproc = None,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Repeat a step of a run and compare it with the log. It starts from the nearest checkpoint before the step."""
    with reporting(debug):
        from lockstep.configs import config_file
        from lockstep.core.errors import UsageError
        from lockstep.trainer import earlier_configs

        if run_dir.is_file():
            check_replaceable(json_file, force=force)
            joined.replayer("bundle")(run_dir, overrides or (), trust=trust, json_file=json_file)
            return
        if step is None:
            raise UsageError("a run has many steps", where="--step", remedy="give one of them: --step N")
        for file in (json_file, profile):
            if file is not None and file.is_file() and file.resolve().is_relative_to(run_dir.resolve()):
                remedy = "give a new file, or another folder"
                raise UsageError("the run has such a file, which would be lost", where=str(file), remedy=remedy)
            check_replaceable(file, force=force)
        if ranks_then is not None and rank is None:
            raise UsageError("it says how many ranks there were for --rank", where="--ranks", remedy="give --rank, too")
        if debugger and nproc not in (None, "1"):
            raise UsageError("a debugger needs one rank", where="--debugger", remedy="leave --nproc out")
        settings = config_file.read_run(
            run_dir, overrides or (), REPLAY_KEYS, file=earlier_configs.path_at(run_dir, step)
        )
        settings = config_file.with_kept_task(settings, run_dir, tell_first)
        settings, count = ranks.on_machine(settings, None, nproc, overrides or ())
        if ranks.is_launcher(count):
            numbers = as_arguments({"--step": str(step), "--rank": rank, "--ranks": ranks_then})
            others = as_arguments({"--samples": samples, "--profile": profile, "--json": json_file, "--debug": debug})
            others += ["--force"] * force
            arguments = ["replay", str(run_dir), *(overrides or []), *numbers, *others]
            ranks.launch(arguments, count, settings, cold=cold)
            return
        from lockstep.trainer.trainer import Trainer
        from lockstep.watch import replay_report

        wants = replay_report.Wants(rank, ranks_then, samples, debugger, profile)
        with Trainer(settings, run_dir=run_dir, quiet=True).replaying(step) as (run, after):
            report = replay_report.make(run, step, wants, after, tell=tell_first)
        if is_first():
            print(replay_report.text(report), flush=True)
            if json_file is not None:
                write_file(json_file, replay_report.as_json(report))
