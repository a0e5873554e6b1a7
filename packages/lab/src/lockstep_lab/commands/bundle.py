"""`lockstep bundle`, and `lockstep replay` of a bundle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import ranks
from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Cold, Debug, Force, Overrides, RunDir, as_arguments
from lockstep.cli.replay import REPLAY_KEYS
from lockstep.cli.reporting import FAULT, is_first, reporting, tell_first, write_file
from lockstep.core import this_process
from lockstep.core.errors import UsageError, number_of
from lockstep.core.user_files import check_replaceable

_SHOWN = 8


def bundle(
    run_dir: RunDir,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")],
    step: Annotated[int, typer.Option(min=1, help="The step, counted as in the log: the first is 1.")],
    overrides: Overrides = None,
    nproc: Annotated[
        str | None, typer.Option("--nproc", help="Ranks on this machine. Default: as many as trained.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Make the step again from the file, in a new process.")
    ] = True,
    force: Force = False,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Write what one step of a run needs into a file, so that others can make the step again without the data."""
    with reporting(debug):
        from lockstep.configs import config_file
        from lockstep.core import run_folder
        from lockstep.trainer import earlier_configs

        environment = dict(os.environ)  # the launcher adds its own variables
        if not this_process.is_rank():
            check_replaceable(out, force=force)
        settings = config_file.read_run(
            run_dir, overrides or (), REPLAY_KEYS, file=earlier_configs.path_at(run_dir, step)
        )
        settings = config_file.with_kept_task(settings, run_dir, tell_first)
        trained_on = int(run_folder.recorded(run_dir).get("world", 1)) // settings.parallel.tensor
        default = "1" if settings.parallel.virtual_ranks else str(max(1, trained_on))
        settings, count = ranks.on_machine(settings, None, nproc, overrides or (), default=default)
        from lockstep_lab.bundle.make import make, settled, summary

        if ranks.is_launcher(count):
            options = as_arguments({"--step": step, "--force": force, "--debug": debug, "--no-check": True})
            words = ["bundle", str(run_dir), str(out), *(overrides or []), *options]
            ranks.launch(words, count, settings, cold=cold)
        else:
            from lockstep.watch import replay_report

            settings, notes = settled(settings)
            for note in notes:
                tell_first(note)
            report = make(settings, run_dir, step, out, tell=tell_first)
            if is_first():
                print(replay_report.text(report), flush=True)
        if this_process.is_rank():
            return
        print(summary(out), flush=True)
        if check:
            _check(out, environment)


def _check(out: Path, environment: Mapping[str, str]) -> None:
    """Make the step again in a new process, which has none of the objects of this one."""
    words = [sys.executable, "-m", "lockstep", "replay", str(out), "--trust"]
    done = subprocess.run(words, env=environment)
    if done.returncode:
        print("warning: the step cannot be made again from this file, see above", file=sys.stderr)
        raise typer.Exit(done.returncode)


def replay(path: Path, overrides: Sequence[str], *, trust: bool, json_file: Path | None) -> None:
    """Make the step of a bundle again, and compare it with the recorded one. Exit code 3: it differs.

    Raises:
        UsageError: the user does not trust the bundle, or it cannot be used.
    """
    from lockstep_lab.bundle import file

    about, code = file.read_about(path), file.sources(path)
    if this_process.is_rank():
        raise UsageError("a bundle is replayed in one process", where=str(path), remedy="call it without torchrun")
    if not trust:
        files = ", ".join(list(code)[:_SHOWN]) + (f" and {len(code) - _SHOWN} more" if len(code) > _SHOWN else "")
        what = f"a bundle contains code, which replaying it runs with your rights: a pickle{', ' * bool(code)}{files}"
        remedy = f"if you trust who made it, give --trust. To read the code first: unzip -p {path} 'source/*'"
        raise UsageError(what, where=str(path), remedy=remedy)
    from lockstep_lab.bundle import again, compare

    ranks_then = number_of(about["ranks"], "rank")
    tell_first(f"making step {about['step']} of {about['run']} again from {path}, made on {ranks_then}")
    report = compare.compare(again.make(path, overrides))
    print(compare.text(report), flush=True)
    if json_file is not None:
        write_file(json_file, compare.as_json(report))
    if not report.is_equal:
        raise typer.Exit(FAULT)


COMMAND = JoinedCommand(bundle, "lockstep bundle runs/digits step60.zip --step 60", hidden=True, replays=replay)
