"""The command line: its commands. Only the commands that need torch import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from lockstep.cli.audit import audit
from lockstep.cli.check_device import check_device
from lockstep.cli.checkpoints import checkpoints
from lockstep.cli.command import Command, Commands, declared
from lockstep.cli.config import config
from lockstep.cli.env import env
from lockstep.cli.evaluate import evaluate
from lockstep.cli.export import export
from lockstep.cli.first_hour import first_hour
from lockstep.cli.init import init
from lockstep.cli.launch import launch
from lockstep.cli.predict import predict
from lockstep.cli.preflight import preflight
from lockstep.cli.recipes import presets, recipes
from lockstep.cli.replay import replay
from lockstep.cli.run import run
from lockstep.cli.train import train

_COMMANDS: dict[Callable[..., None], str] = {
    recipes: "lockstep recipes",
    presets: "lockstep presets",
    train: "lockstep train digits --nproc 2 optim.lr=1e-3",
    run: "lockstep run --nproc 2 train.py --lr 1e-3",
    evaluate: "lockstep evaluate runs/digits --nproc 2 --checkpoint best",
    predict: "lockstep predict runs/mine 'photos/**/*.jpg' --out predictions.csv",
    checkpoints: "lockstep checkpoints runs/digits --check",
    export: "lockstep export runs/digits weights",
    config: "lockstep config digits optim.lr=1e-3 > mine.yaml",
    replay: "lockstep replay runs/digits --step 120 --samples",
    init: "lockstep init my_task.py, or: lockstep init --from lightning | less",
    preflight: "lockstep preflight digits --nproc 2",
    check_device: "lockstep check-device --nproc auto --seconds 600",
    first_hour: "lockstep first-hour --nproc auto",
    env: "lockstep env > environment.txt",
    audit: "lockstep audit --nproc 2 train.py --lr 1e-3",
}
"""The commands in the order of `lockstep --help`, each with the example that its own help ends with."""

app = typer.Typer(
    cls=Commands,
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Distributed PyTorch training whose result does not depend on how it was run.",
)
for _call, _example in _COMMANDS.items():
    _name = _call.__name__.replace("_", "-")
    Command(_call, _example, passes_arguments=_call in (audit, run), helps_itself=_call is audit).join(app, _name)
app.add_typer(launch, name="launch")
for _name, _command in declared().items():
    _command.join(app, _name)


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
