"""`lockstep doctor`: the commands that look at machines."""

from __future__ import annotations

from collections.abc import Callable

import typer

from lockstep.cli.check_device import check_device
from lockstep.cli.commands import Command, CommandGroup
from lockstep.cli.env import env
from lockstep.cli.preflight import preflight
from lockstep.cli.recipes import presets

_EXAMPLES: dict[Callable[..., None], str] = {
    env: "lockstep doctor env > environment.txt",
    preflight: "lockstep doctor preflight digits --nproc 2",
    check_device: "lockstep doctor check-device --nproc auto --seconds 600",
    presets: "lockstep doctor presets",
}

doctor = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Check machines: versions, network, devices, presets.",
    epilog="Example: lockstep doctor env",
)
for _command, _example in _EXAMPLES.items():
    doctor.command(cls=Command, epilog=f"Example: {_example}")(_command)
