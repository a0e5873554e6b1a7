"""Loader workers that are not forked know no module of the user's file: they execute the file before they unpickle."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping

_PREFIX = "lockstep_user_"  # names that `plugins.import_file` gives to files outside of packages


class ExecutedFiles:
    """Executes the files in the process that unpickles this object.

    An object that holds it as its first attribute may hold objects of classes in these files after it.
    """

    def __reduce__(self) -> tuple[Callable[[Mapping[str, str]], ExecutedFiles], tuple[Mapping[str, str]]]:
        modules = list(sys.modules.items())
        return _execute, ({name: str(module.__file__) for name, module in modules if name.startswith(_PREFIX)},)


def _execute(files: Mapping[str, str]) -> ExecutedFiles:
    for name, path in files.items():
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    return ExecutedFiles()
