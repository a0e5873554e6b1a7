"""`lockstep recipes` and `lockstep doctor presets`."""

from __future__ import annotations


def recipes() -> None:
    """List the recipes: shipped ones and those of installed packages."""
    from lockstep.configs import config_file

    _list(config_file.recipes())


def presets() -> None:
    """List the presets for --preset: how machines run a training."""
    from lockstep.cli import config_preset

    _list(config_preset.presets())


def _list(known: dict[str, str]) -> None:
    wide = max(map(len, known))
    for name, about in known.items():
        print(f"{name:<{wide}}  {about}")
