"""`lockstep config`."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.cli.options import Debug, Overrides
from lockstep.cli.reporting import reporting


def config(
    target: Annotated[str, typer.Argument(metavar="RECIPE|FILE.yaml|FILE.py:Task", help="Recipe or task to show.")],
    overrides: Overrides = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="NAME|FILE.yaml", help="Show the values with this preset of a machine."),
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Leave out the meaning of each key.")] = False,
    debug: Debug = False,
) -> None:
    """Print all keys of a training. Each comes with its meaning, its value, and where the value comes from."""
    with reporting(debug):
        from lockstep.cli import config_text

        print(config_text.resolved(target, overrides or (), preset=preset, explained=not short), end="")
