"""What a task learns from its data and keeps with its run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.core import atomic
from lockstep.core.errors import UsageError


def keep(folder: Path, name: str, about: Callable[[], Any], save: Callable[[Path], None]) -> None:
    """Write a dataclass, and other files, into the folder that is kept with a run. Do nothing if they are there.

    Args:
        name: of the JSON file of the dataclass.
        about: makes the dataclass.
        save: writes the other files into a folder.

    Raises:
        UsageError: the folder cannot be written.
    """
    if (folder / name).exists():
        return
    found = about()
    try:
        with atomic.staged_folder(folder, replace=True) as staging:
            (staging / name).write_text(json.dumps(asdict(found)))
            save(staging)
    except OSError as error:
        remedy = "choose another place with --run-dir"
        raise UsageError(f"cannot write: {error.strerror}", where=str(folder), remedy=remedy) from error
