"""The command line: its commands. Only the commands that need torch import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from lockstep.cli.audit import audit
from lockstep.cli.check_device import check_device
from lockstep.cli.checkpoints import checkpoints
from lockstep.cli.config import config
from lockstep.cli.env import env
from lockstep.cli.evaluate import evaluate
from lockstep.cli.export import export
from lockstep.cli.first_hour import first_hour
from lockstep.cli.init import init
from lockstep.cli.launch import launch
from lockstep.cli.plan import plan
from lockstep.cli.predict import predict
from lockstep.cli.preflight import preflight
from lockstep.cli.recipes import presets, recipes
from lockstep.cli.replay import replay
from lockstep.cli.report import compare, report
from lockstep.cli.run import run
from lockstep.cli.shards import shards
from lockstep.cli.sweep import sweep
from lockstep.cli.train import train
from lockstep.cli.tune import tune
from lockstep.cli.verify import verify

_COMMANDS: dict[Callable[..., None], str] = {
    recipes: "lockstep recipes",
    presets: "lockstep presets",
    train: "lockstep train digits --nproc 2 optim.lr=1e-3",
    run: "lockstep run --nproc 2 train.py --lr 1e-3",
    evaluate: "lockstep evaluate runs/digits --nproc 2 --checkpoint best",
    predict: "lockstep predict runs/mine 'photos/**/*.jpg' --out predictions.csv",
    checkpoints: "lockstep checkpoints runs/digits --check",
    export: "lockstep export runs/digits weights",
    verify: "lockstep verify my_task.py:MyTask --nproc 2 --quick",
    config: "lockstep config digits optim.lr=1e-3 > mine.yaml",
    report: "lockstep report runs/digits",
    replay: "lockstep replay runs/digits --step 120 --samples",
    compare: "lockstep compare runs/digits runs/digits-2",
    shards: "lockstep shards photos/ shards/ --shuffle 0",
    sweep: "lockstep sweep digits grid.yaml --trials 20 --parallel 2",
    init: "lockstep init my_task.py, or: lockstep init --from lightning | less",
    plan: "lockstep plan imagenet --gpus 8 --gpu 'A100 80GB'",
    preflight: "lockstep preflight digits --nproc 2",
    check_device: "lockstep check-device --nproc auto --seconds 600",
    first_hour: "lockstep first-hour --nproc auto",
    env: "lockstep env > environment.txt",
    audit: "lockstep audit --nproc 2 train.py --lr 1e-3",
}
"""The commands in the order of `lockstep --help`, each with the example that its own help ends with."""

_FOREIGN = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
"""Of a command that passes on arguments of a script."""

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Distributed PyTorch training whose result does not depend on how it was run.",
)
for _command, _example in _COMMANDS.items():
    _settings = _FOREIGN if _command in (audit, run) else None
    _helps_itself = _command is audit
    app.command(epilog=f"Example: {_example}", context_settings=_settings, add_help_option=not _helps_itself)(_command)
app.add_typer(launch, name="launch")
app.add_typer(tune, name="tune")


def _show_version(wanted: bool) -> None:
    if wanted:
        import lockstep

        print(f"lockstep {lockstep.__version__}")
        raise typer.Exit


@app.callback()
def _application(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> Any:
    """The `lockstep` command."""
    app(prog_name="lockstep")
