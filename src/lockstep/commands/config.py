"""`lockstep config`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated

import typer


def add_to(app: typer.Typer, reporting: Callable[[bool], AbstractContextManager[None]]) -> None:
    """Add the command to the application.

    Args:
        reporting: turns exceptions into messages and exit codes.
    """

    @app.command(epilog="Example: lockstep config digits optim.lr=1e-3 > mine.yaml")
    def config(
        target: Annotated[str, typer.Argument(metavar="RECIPE|FILE.yaml|FILE.py:Task", help="What would be trained.")],
        overrides: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the config, by dotted path.")
        ] = None,
        preset: Annotated[
            str | None,
            typer.Option("--preset", metavar="NAME|FILE.yaml", help="With the values of a machine's preset."),
        ] = None,
        short: Annotated[bool, typer.Option("--short", help="Without the meaning of each key.")] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of all errors.")] = False,
    ) -> None:
        """Print the whole config of a training: every key, its meaning, its value, and where the value comes from."""
        with reporting(debug):
            from lockstep import config_text

            print(config_text.resolved(target, overrides or (), preset=preset, explained=not short), end="")
