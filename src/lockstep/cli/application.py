"""The command line: its commands. Only the commands that need torch import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import typer

from lockstep.cli import pages
from lockstep.cli.audit import audit
from lockstep.cli.checkpoints import checkpoints
from lockstep.cli.commands import Command, Group
from lockstep.cli.config import config
from lockstep.cli.doctor import doctor
from lockstep.cli.evaluate import EVALUATION_KEYS, evaluate
from lockstep.cli.export import export
from lockstep.cli.init import init
from lockstep.cli.launch import launch
from lockstep.cli.plan import plan
from lockstep.cli.predict import predict
from lockstep.cli.recipes import recipes
from lockstep.cli.replay import REPLAY_KEYS, replay
from lockstep.cli.report import compare, report
from lockstep.cli.reporting import reporting
from lockstep.cli.run import run
from lockstep.cli.shards import shards
from lockstep.cli.sweep import sweep
from lockstep.cli.train import train
from lockstep.cli.tune import tune
from lockstep.cli.verify import verify

_EXAMPLES: dict[Callable[..., None], str] = {
    init: "lockstep init my_task.py, or: lockstep init --from lightning | less",
    train: "lockstep train digits --nproc 2 optim.lr=1e-3",
    run: "lockstep run --nproc 2 train.py --lr 1e-3",
    evaluate: "lockstep evaluate runs/digits --nproc 2 --checkpoint best",
    predict: "lockstep predict runs/mine 'photos/**/*.jpg' --out predictions.csv",
    export: "lockstep export runs/digits weights",
    verify: "lockstep verify my_task.py:MyTask --nproc 2 --quick",
    audit: "lockstep audit --nproc 2 train.py --lr 1e-3",
    replay: "lockstep replay runs/digits --step 120 --samples",
    report: "lockstep report runs/digits",
    compare: "lockstep compare runs/digits runs/digits-2 --out compare.html",
    checkpoints: "lockstep checkpoints runs/digits --check",
    recipes: "lockstep recipes",
    config: "lockstep config digits optim.lr=1e-3 > mine.yaml",
    plan: "lockstep plan imagenet --gpus 8 --gpu 'A100 80GB'",
    sweep: "lockstep sweep digits grid.yaml --trials 20 --parallel 2",
    shards: "lockstep shards photos/ shards/ --shuffle 0",
}
"""The commands, each with the example that its own help ends with."""

_SCRIPTS = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
"""Of a command that passes on arguments of a script."""
_SETTINGS: dict[Callable[..., None], dict[str, Any]] = {
    audit: _SCRIPTS,
    run: _SCRIPTS,
    evaluate: {"obj": EVALUATION_KEYS},
    replay: {"obj": REPLAY_KEYS},
}
"""Settings of the context. `obj`: the keys that the command takes, for `commands.Command`."""


class _Groups(Group):
    headings: ClassVar[dict[str, tuple[str, ...]]] = {
        "Train": ("init", "train", "run", "evaluate", "predict", "export"),
        "Check": ("verify", "audit", "replay"),
        "Look": ("report", "compare", "checkpoints"),
        "Choose": ("recipes", "config", "plan", "tune", "sweep"),
        "Data and machines": ("shards", "launch", "doctor"),
    }


app = typer.Typer(
    cls=_Groups,
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Distributed PyTorch training whose result does not depend on how it was run.",
)
for _command, _example in _EXAMPLES.items():
    app.command(
        cls=Command,
        epilog=f"Example: {_example}",
        context_settings=_SETTINGS.get(_command),
        add_help_option=_command is not audit,  # it helps itself
    )(_command)
app.add_typer(tune, name="tune")
app.add_typer(launch, name="launch")
app.add_typer(doctor, name="doctor")


def _show_version(wanted: bool) -> None:
    if wanted:
        import lockstep

        print(f"lockstep {lockstep.__version__}")
        raise typer.Exit


def _explain(name: str | None) -> None:
    if name is not None:
        with reporting(debug=False):
            print(pages.read(name), end="")
        raise typer.Exit


@app.callback()
def _application(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="PAGE", callback=_explain, is_eager=True, help="Print a page, such as loop."),
    ] = None,
) -> None:
    pass


def main() -> Any:
    """The `lockstep` command."""
    app(prog_name="lockstep")
