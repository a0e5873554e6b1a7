"""The command line: its commands. Only the commands that need torch import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import typer

from lockstep.cli import pages
from lockstep.cli.audit import audit
from lockstep.cli.checkpoints import checkpoints
from lockstep.cli.commands import Command, CommandGroup
from lockstep.cli.config import config
from lockstep.cli.doctor import doctor
from lockstep.cli.evaluate import EVALUATION_KEYS, evaluate
from lockstep.cli.export import export
from lockstep.cli.init import init
from lockstep.cli.joined import declared, of_missing_package
from lockstep.cli.launch import launch
from lockstep.cli.predict import predict
from lockstep.cli.recipes import recipes
from lockstep.cli.replay import REPLAY_KEYS, replay
from lockstep.cli.reporting import reporting
from lockstep.cli.run import run
from lockstep.cli.train import train

_EXAMPLES: dict[Callable[..., None], str] = {
    init: "lockstep init my_task.py, or: lockstep init --from lightning | less",
    train: "lockstep train digits --nproc 2 optim.lr=1e-3",
    run: "lockstep run --nproc 2 train.py --lr 1e-3",
    evaluate: "lockstep evaluate runs/digits --nproc 2 --checkpoint best",
    predict: "lockstep predict runs/mine 'photos/**/*.jpg' --out predictions.csv",
    export: "lockstep export runs/digits weights",
    audit: "lockstep audit --nproc 2 train.py --lr 1e-3",
    replay: "lockstep replay runs/digits --step 120 --samples",
    checkpoints: "lockstep checkpoints runs/digits --check",
    recipes: "lockstep recipes",
    config: "lockstep config digits optim.lr=1e-3 > mine.yaml",
}
"""The engine's commands, each with the example that its own help ends with."""

_SCRIPTS = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
"""The settings of a command that passes on the arguments of a script."""
_SETTINGS: dict[Callable[..., None], dict[str, Any]] = {
    audit: _SCRIPTS,
    run: _SCRIPTS,
    evaluate: {"obj": EVALUATION_KEYS},
    replay: {"obj": REPLAY_KEYS},
}
"""Settings of the context. `obj`: the keys that the command takes, for `commands.Command`."""


class _Groups(CommandGroup):
    headings: ClassVar[dict[str, tuple[str, ...]]] = {
        "Train": ("init", "train", "run", "evaluate", "predict", "export"),
        "Check": ("verify", "audit", "replay", "bundle", "bisect"),
        "Look": ("look", "report", "compare", "checkpoints"),
        "Choose": ("recipes", "config", "plan", "tune", "sweep"),
        "Data and machines": ("shards", "launch", "doctor"),
    }

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and (error := of_missing_package(cmd_name)) is not None:
            with reporting(debug=False):
                raise error
        return found


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
        hidden=_command is replay,  # the watch prints it where it is needed, and the list has room for 20
        add_help_option=_command is not audit,  # it helps itself
    )(_command)
app.add_typer(launch, name="launch")
app.add_typer(doctor, name="doctor")
_own = {*(_command.__name__.replace("_", "-") for _command in _EXAMPLES), "launch", "doctor"}
for _name, _joined in declared(_own).items():
    _joined.join(doctor if _joined.group == "doctor" else app, _name)


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
