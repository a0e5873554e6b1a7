"""Commands that other distributions declare as entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import typer

from lockstep.cli.commands import Command
from lockstep.core import plugins
from lockstep.core.entry_points import EntryPoint, entry_points
from lockstep.core.errors import UsageError

GROUP = "lockstep.commands"  # of entry points

PACKAGES = {
    "torch-lockstep-lab": ("bisect", "bundle", "compare", "plan", "report", "sweep", "tune", "verify"),
    "torch-lockstep-recipes": ("look", "shards"),
}
"""Commands that other distributions of Lockstep bring, for the error if they are not installed."""


@dataclass(frozen=True)
class JoinedCommand:
    """A command of `lockstep` that a distribution declares."""

    call: Callable[..., None] | typer.Typer
    """A function as Typer takes it, or an application with commands."""
    example: str = ""
    group: str = ""
    """The group of commands that it joins: `doctor`. Empty: none."""
    hidden: bool = False
    """Leave the command out of the list in `lockstep --help`."""
    replays: Callable[..., None] | None = None
    """Replays a file that the command has written: what `lockstep replay FILE` calls."""

    def join(self, app: typer.Typer, name: str) -> None:
        """Add the command to the command line."""
        if isinstance(self.call, typer.Typer):
            app.add_typer(self.call, name=name)
        else:
            epilog = f"Example: {self.example}" if self.example else None
            app.command(name, cls=Command, epilog=epilog, hidden=self.hidden)(self.call)


def declared(taken: Collection[str]) -> dict[str, JoinedCommand]:
    """The commands of other distributions by name. One that cannot be imported is a command that reports the reason.

    What is wrong with a distribution must not break other commands: a line on stderr names it.

    Args:
        taken: names of the engine's own commands, which no distribution replaces.
    """
    try:
        entries = entry_points(GROUP)
    except UsageError as error:
        print(f"warning: the commands of other distributions are missing: {error}", file=sys.stderr)
        return {}
    for name in entries.keys() & set(taken):
        what = f"the command {name!r} of {entries[name].origin} is left out: Lockstep has its own"
        print(f"warning: {what}", file=sys.stderr)
    return {name: _loaded(entry) for name, entry in entries.items() if name not in taken}


def replayer(command: str) -> Callable[..., None]:
    """What replays the files that a command of another distribution writes.

    Raises:
        UsageError: the distribution is not installed, or cannot be loaded.
    """
    entry = entry_points(GROUP).get(command)
    found: Callable[..., None] | None = plugins.load(entry).replays if entry is not None else None
    if found is None:
        raise of_missing_package(command) or UsageError(f"`lockstep {command}` writes no files to replay")
    return found


def _loaded(entry: EntryPoint) -> JoinedCommand:
    try:
        found: Any = plugins.load(entry)
        if not isinstance(found, JoinedCommand) and not callable(found):
            raise plugins.unusable(entry, "is neither a function nor a lockstep.cli.joined.JoinedCommand")
    except UsageError as error:
        return JoinedCommand(_failing(error))
    return found if isinstance(found, JoinedCommand) else JoinedCommand(found)


def _failing(error: UsageError) -> Callable[..., None]:
    from lockstep.cli.reporting import reporting

    def command(context: typer.Context) -> None:
        with reporting(debug=False):
            raise error

    command.__doc__ = f"(cannot be loaded: {error.where})"
    return command


def of_missing_package(name: str) -> UsageError | None:
    """The error for a command of a distribution of Lockstep that is not installed. None: no distribution has it."""
    package = next((package for package, names in PACKAGES.items() if name in names), None)
    if package is None:
        return None
    what = f"`lockstep {name}` is a command of the package {package}, which is not installed"
    extra = package.removeprefix("torch-lockstep-")
    return UsageError(what, remedy=f"in the clone of Lockstep: pip install -e packages/{extra}")
