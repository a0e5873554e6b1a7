"""The configs with which earlier steps of a run were made, if a key was changed on the way (`--allow-change`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lockstep.configs import config_file, config_layers
from lockstep.core import atomic
from lockstep.core.config.sections import RunConfig, training_keys

FOLDER = "configs"
_NAME = re.compile(r"until-(\d+)\.yaml")


def path_at(run_dir: Path, step: int) -> Path:
    """The file with the config with which a step was made. The first step of a training is 1."""
    return next((path for until, path in _kept(run_dir) if until >= step), run_dir / "config.yaml")


def change_between(run_dir: Path, first: int, step: int) -> int | None:
    """The step, above `first` and below `step`, after which the config changed. None: it is the same for all."""
    return next((until for until, _ in _kept(run_dir) if first < until < step), None)


def keep(run_dir: Path, config: RunConfig, step: int) -> None:
    """Keep the config of the steps so far, if a start after `step` steps changes it. Called before it is replaced.

    Steps after `step` will be made again with `config`, also those that were made before with other configs.
    """
    before = path_at(run_dir, step)
    text = before.read_text(encoding="utf-8") if step and before.is_file() else None
    changed = text is not None and differences(_read(before), config)
    for until, path in _kept(run_dir):
        if until >= step:
            atomic.remove(path)
    if changed and text is not None:
        (run_dir / FOLDER).mkdir(exist_ok=True)
        atomic.write_text(run_dir / FOLDER / f"until-{step:08}.yaml", text)


def differences(then: RunConfig, now: RunConfig) -> list[str]:
    """The keys that determine the steps and differ, with both values."""
    old, new = _keys(then), _keys(now)
    names = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return [f"{key}: {old.get(key)!r} then, {new.get(key)!r} now" for key in names]


def of_step(run_dir: Path, step: int) -> RunConfig:
    """The config with which a step was made."""
    return _read(path_at(run_dir, step))


def _read(path: Path) -> RunConfig:
    return config_file.parse(config_layers.read_yaml(path), str(path), needs_task=False)


def _keys(config: RunConfig) -> dict[str, Any]:
    """The training keys, and those of the length, which shapes the schedule."""
    train = config.train
    length = {"train.steps": train.steps, "train.epochs": train.epochs, "train.min_steps": train.min_steps}
    return training_keys(config) | length | {"schedule.total_steps": config.schedule.total_steps}


def _kept(run_dir: Path) -> list[tuple[int, Path]]:
    found = ((_NAME.fullmatch(path.name), path) for path in (run_dir / FOLDER).glob("until-*.yaml"))
    return sorted((int(name[1]), path) for name, path in found if name)
