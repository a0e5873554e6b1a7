"""Loader workers that are not forked know no module of the user's file: they execute the file before they unpickle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.core import plugins


class ExecutedFiles:
    """Executes the files in the process that unpickles this object.

    An object that holds it as its first attribute may hold objects of classes in these files after it.
    """

    def __reduce__(self) -> tuple[Callable[[Mapping[str, str]], ExecutedFiles], tuple[Mapping[str, str]]]:
        modules = list(sys.modules.items())
        return _execute, (
            {name: str(module.__file__) for name, module in modules if name.startswith(plugins.USER_PREFIX)},
        )


def _execute(files: Mapping[str, str]) -> ExecutedFiles:
    for name, path in files.items():
        if name not in sys.modules:
            plugins.execute(Path(path), name)
    return ExecutedFiles()
