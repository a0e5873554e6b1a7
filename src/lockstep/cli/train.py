"""`lockstep train`."""

from __future__ import annotations

import datetime
import gc
import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options, ranks
from lockstep.cli.options import Cold, Debug, Nproc, Overrides, Preset, Target, as_arguments
from lockstep.cli.reporting import is_first, reporting
from lockstep.core import this_process
from lockstep.core.errors import MemoryShortage, UsageError

_AUTO = Path("auto")

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


_RunDir = Annotated[
    Path | None,
    typer.Option(help="Directory of the run. Default: runs/NAME. auto: a new one each time, runs/NAME-DATE-NUMBER."),
]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Start again: delete an earlier run in the run directory.")]
_AllowChange = Annotated[
    list[str] | None,
    typer.Option("--allow-change", metavar="KEY", help="Resume the run although this key has a different value."),
]
_MaxRestarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Restarts of killed or crashed ranks. Default: 3; for a single rank: 0.",
    ),
]
_Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="STEPS",
        help="Profile these steps, such as 5-10. A single N: N steps after the first five.",
    ),
]
_DebugRank = Annotated[
    int | None,
    typer.Option(
        "--debug-rank", metavar="RANK", min=0, help="Rank in which breakpoint() works; the others wait for it."
    ),
]


def train(
    target: Target,
    overrides: Overrides = None,
    nproc: Nproc = None,
    preset: Preset = None,
    run_dir: _RunDir = None,
    fresh: _Fresh = False,
    allow_change: _AllowChange = None,
    max_restarts: _MaxRestarts = None,
    profile: _Profile = None,
    nnodes: options.Nnodes = None,
    rendezvous: options.Rendezvous = None,
    rendezvous_id: options.RendezvousId = None,
    wait_for_nodes: options.WaitForNodes = 600,
    debug_rank: _DebugRank = None,
    cold: Cold = False,
    debug: Debug = False,
) -> None:
    """Train a recipe or a task. The same command again resumes the run.

    On several machines: the same command on each, with --nnodes 2 --rendezvous node0:29400.
    """
    with reporting(debug):
        from lockstep.core.parallel import signals

        with signals.listening():  # before anything that takes time: the config 0.3 s, torch 3 s
            from lockstep.configs import config_file
            from lockstep.launch import node_address

            if profile is not None:
                from lockstep.parts import profile as profiling

                profiling.parse(profile)
            if debug_rank is not None:
                overrides = _let_debug(debug_rank, overrides or [])
            settings = config_file.load(target, overrides or [])
            settings, nproc = ranks.on_machine(settings, preset, nproc, overrides or [])
            if run_dir == _AUTO:
                run_dir = _new_folder(settings.name, one_launcher=not this_process.is_rank() and nnodes is None)
            of_verify: dict[str, object] = {"--run-dir": run_dir, "--preset": preset}
            several = node_address.several(nnodes, rendezvous) if not this_process.is_rank() else None
            if several is not None and debug_rank is not None:
                raise UsageError("it is for ranks of one machine", where="--debug-rank", remedy="leave out --nnodes")
            if several is None and not ranks.is_launcher(nproc, max_restarts):
                from lockstep.trainer.trainer import Trainer

                trainer = Trainer(
                    settings, run_dir=run_dir, fresh=fresh, allow_change=allow_change or (), profile=profile
                )
                _fit(trainer)
                _invite_to_verify(trainer, target, overrides or [], as_arguments(of_verify))
                return
        more = {"--fresh": fresh, "--debug": debug, "--profile": profile, "--allow-change": allow_change}
        arguments = ["train", target, *(overrides or []), *as_arguments(of_verify | more)]
        ranks.launch(
            arguments,
            nproc,
            settings,
            several=several,
            run_id=rendezvous_id or (run_dir or Path("runs", settings.name)).resolve().name,
            wait_s=wait_for_nodes,
            max_restarts=3 if max_restarts is None else max_restarts,
            cold=cold,
        )


def _fit(trainer: Trainer) -> None:
    """Train. A single rank without launcher begins again by itself if memory does not suffice."""
    while True:
        try:
            trainer.fit()
            return
        except MemoryShortage as error:
            if this_process.is_rank() or not error.retryable:
                raise
            text = str(error)
        # The frames of the error, which hold the model, are free here.
        print(f"{text}\nthe training starts again", file=sys.stderr, flush=True)
        trainer.fresh = False
        gc.collect()


def _let_debug(rank: int, overrides: Sequence[str]) -> list[str]:
    """Let breakpoints work in `rank`, and return the overrides with which they also work where samples are read."""
    from lockstep.core import debugging

    if this_process.is_rank():
        raise UsageError(
            "another launcher has started the ranks",
            where="--debug-rank",
            remedy="let this command start them: --nproc N without torchrun",
        )
    os.environ[debugging.RANK] = str(rank)
    return [*overrides, "data.workers=0"]


def _new_folder(name: str, *, one_launcher: bool) -> Path:
    """Make the folder of a new run: `runs/NAME-DATE-NUMBER`, such as `runs/digits-2026-11-23-1`.

    Raises:
        UsageError: several processes would each make a folder.
    """
    if not one_launcher:
        remedy = "give a name, the same on all nodes"
        raise UsageError("auto is for one launcher on one machine", where="--run-dir", remedy=remedy)
    stem = f"{name}-{datetime.date.today():%Y-%m-%d}"
    for number in itertools.count(1):
        folder = Path("runs", f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            what = f"cannot be made: {error.strerror}"
            raise UsageError(what, where=str(folder), remedy="choose another place with --run-dir") from error
        print(f"the run directory is {folder}; give --run-dir {folder} to resume this run", file=sys.stderr)
        return folder
    raise AssertionError  # the numbers do not end


def _invite_to_verify(trainer: Trainer, target: str, overrides: Sequence[str], options: Sequence[str]) -> None:
    """Print the command that checks this training, to be pasted into a shell, unless the training was checked already.

    Args:
        options: those of the command line that `verify` takes, so that it writes into the same folder.
    """
    from lockstep.trainer import run_directory

    if not is_first() or run_directory.is_verified(trainer.run_dir, trainer.config):
        return
    count = this_process.local_ranks()
    nproc = ["--nproc", str(count)] if count > 2 else []  # 2 is the default
    device = ["device=cpu"] if trainer.config.device == "mps" else []  # which verify does not take
    command = ["lockstep", "verify", target, *overrides, *device, *nproc, *options]
    print(f"Check this training: {shlex.join(command)}", flush=True)
