"""`lockstep verify`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import ranks
from lockstep.cli.joined import JoinedCommand
from lockstep.cli.options import Cold, Debug, Force, Overrides, Preset, Target
from lockstep.cli.reporting import FAILED, FAULT, reporting
from lockstep.core import this_process
from lockstep.core.errors import UsageError
from lockstep.core.user_files import check_replaceable
from lockstep.trainer import local_ranks

if TYPE_CHECKING:
    from lockstep_lab.verify.result import VerifyResult


def verify(
    target: Target,
    overrides: Overrides = None,
    nproc: Annotated[
        str | None,
        typer.Option("--nproc", help="Ranks on this machine; auto: one per GPU. Default: the preset's, or 2."),
    ] = None,
    preset: Preset = None,
    checks: Annotated[str, typer.Option(metavar="A,B,C", help="Checks to make. Default: all but bits.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Make shorter trainings.")] = False,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each comparison. Default: 12, with --quick 8; of a script: 20, with --quick 8."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for verify.json and verify.html. Default: runs/NAME.")
    ] = None,
    force: Force = False,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Check that a training is right, on its own model and data. Exit code 3: a fault; 1: nothing could be shown.

    The target may also be a script with a lockstep.Loop. Its arguments come after `--`.
    """
    with reporting(debug):
        from lockstep.configs import config_file, own_file
        from lockstep.trainer import foreign

        if this_process.is_rank():
            raise UsageError(
                "verify starts its own ranks",
                where="environment variable RANK",
                remedy="call it without torchrun, with --nproc",
            )
        names = [name.strip() for name in checks.split(",") if name.strip()]
        if own_file.is_loop_script(target):
            if preset is not None:
                remedy = "give --nproc; the script itself says the rest"
                raise UsageError("a preset changes a config, and a script has none", where="--preset", remedy=remedy)
            _verify_script(
                target,
                overrides or [],
                nproc or "2",
                run_dir or Path("runs", f"{Path(target).stem}-verify"),
                checks=names,
                steps=steps or (8 if quick else None),
                force=force,
                cold=cold,
            )
            return
        settings = config_file.load(target, overrides or [])
        settings, nproc = ranks.on_machine(settings, preset, nproc, overrides or [], default="2")
        count = local_ranks.ranks_of(nproc)
        settings = foreign.settled_alone(settings)
        groups = max(1, count // settings.parallel.tensor)  # of ranks that have the same samples
        settings = settings.model_copy(update={"batch": settings.batch.resolve(groups)})
        _prepare(local_ranks.modules_of(settings), cold=cold)
        from lockstep_lab.verify import command

        folder = run_dir or Path("runs", settings.name)
        with _claimed(folder, force=force):
            config = settings.model_dump(by_alias=True)
            result = command.verify(config, count, folder, checks=names, quick=quick, steps=steps)
        _end(result, folder)


def _verify_script(
    script: str,
    arguments: list[str],
    nproc: str,
    folder: Path,
    *,
    checks: list[str],
    steps: int | None,
    force: bool,
    cold: bool,
) -> None:
    count = local_ranks.ranks_of(nproc)
    _prepare(["lockstep_lab.verify.script_trial", *local_ranks.MODULES], cold=cold)
    from lockstep_lab.verify.script import STEPS, verify_script

    with _claimed(folder, force=force):
        result = verify_script(script, arguments, count, folder, checks=checks, steps=steps or STEPS)
    if result.faults:
        print(f"what the script printed: {folder}/verify.log")
    _end(result, folder)


def _prepare(modules: Sequence[str], *, cold: bool) -> None:
    """Start the process from which ranks are forked."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: ranks and their files are cleaned up
    if not cold:
        from lockstep.launch import warm_process

        # Otherwise libraries start threads while they are imported, and ranks slow each other down.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        warm_process.start(modules)


@contextlib.contextmanager
def _claimed(folder: Path, *, force: bool) -> Iterator[None]:
    """Inside, no other verification writes into the folder, which has no other files of these names."""
    from lockstep.trainer import run_directory
    from lockstep_lab.verify import command

    for name, mark in command.MARKS.items():
        if folder.is_dir():
            check_replaceable(folder / name, force=force, mark=mark)

    def tell(holder: str) -> None:
        print(f"waiting for {holder}, which verifies in {folder}", file=sys.stderr, flush=True)

    with run_directory.locked(folder, ".verify-lock", tell):  # a second verification would overwrite the same files
        yield


def _end(result: VerifyResult, folder: Path) -> None:
    from lockstep_lab.verify import report

    print(report.summary(result))
    print(f"written: {folder}/verify.json, {folder}/verify.html")
    if result.faults:
        raise typer.Exit(FAULT)
    if result.shows_nothing:
        raise typer.Exit(FAILED)


COMMAND = JoinedCommand(verify, "lockstep verify my_task.py:MyTask --nproc 2 --quick")
