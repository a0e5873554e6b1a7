"""What a command is: the engine's own, and those that other distributions declare as entry points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from lockstep.core import plugins
from lockstep.core.entry_points import entry_points
from lockstep.core.errors import UsageError

GROUP = "lockstep.commands"  # of entry points

PACKAGES = {
    "torch-lockstep-lab": ("compare", "plan", "report", "sweep", "tune", "verify"),
    "torch-lockstep-recipes": ("shards",),
}
"""Commands that other distributions of Lockstep bring, for the error if they are not installed."""


@dataclass(frozen=True)
class Command:
    """A command of `lockstep`."""

    call: Callable[..., None] | typer.Typer
    """A function as Typer takes it, or an application with commands."""
    example: str = ""
    passes_arguments: bool = False
    """Whether options that it does not know are arguments of a script."""
    helps_itself: bool = False
    """Whether it has its own `--help`."""

    def join(self, app: typer.Typer, name: str) -> None:
        """Add the command to the command line."""
        if isinstance(self.call, typer.Typer):
            app.add_typer(self.call, name=name)
            return
        passed = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
        app.command(
            name,
            epilog=f"Example: {self.example}" if self.example else None,
            context_settings=passed if self.passes_arguments else None,
            add_help_option=not self.helps_itself,
        )(self.call)


def declared() -> dict[str, Command]:
    """The commands of other distributions by name. One that cannot be imported is a command that says so."""
    return {name: _loaded(name) for name in entry_points(GROUP)}


def _loaded(name: str) -> Command:
    entry = entry_points(GROUP)[name]
    try:
        found: Any = plugins.load(entry)
        if not isinstance(found, Command) and not callable(found):
            raise plugins.unusable(entry, "is neither a function nor a lockstep.cli.command.Command")
    except UsageError as error:
        return Command(_failing(error), passes_arguments=True)
    return found if isinstance(found, Command) else Command(found)


def _failing(error: UsageError) -> Callable[..., None]:
    from lockstep.cli.reporting import reporting

    def command(context: typer.Context) -> None:
        with reporting(debug=False):
            raise error

    command.__doc__ = f"(cannot be loaded: {error.where})"
    return command


class Commands(TyperGroup):
    """The commands by name. A command of a package that is not installed is an error that names the package."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        package = next((package for package, names in PACKAGES.items() if cmd_name in names), None)
        if found is None and package is not None:
            from lockstep.cli.reporting import reporting

            with reporting(debug=False):
                extra = package.removeprefix("torch-lockstep-")
                what = f"`lockstep {cmd_name}` is a command of the package {package}, which is not installed"
                raise UsageError(what, remedy=f"pip install 'torch-lockstep[{extra}]'; in a clone: make .venv/.ready")
        return found
