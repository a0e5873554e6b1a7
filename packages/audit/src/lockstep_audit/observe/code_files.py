"""The library that a code file belongs to, by the real folders of libraries: a user's folders may have any name."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

LOCKSTEP, PYTHON = "lockstep", "python"
_AUDIT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_PYTHON = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}


@functools.cache
def library_of(file: str) -> str | None:
    """The library of a file: `lockstep` (the audit, and torch-lockstep), `python` (the standard library), or the top
    name of an installed package.

    None: the file is the user's. So is code without a file, from a notebook or `python -c`.

    Args:
        file: its name in a code object or a traceback.
    """
    if file.startswith("<"):
        return PYTHON if file.startswith("<frozen ") else None
    ours = (_AUDIT, _engine())
    for path in dict.fromkeys((os.path.abspath(file), os.path.realpath(file))):  # some installers make links
        name, folder = "", path
        while folder != os.path.dirname(folder):
            folder, name = os.path.split(folder)
            if os.path.join(folder, name) in ours:
                return LOCKSTEP
            if _has_packages(folder):
                return name.removesuffix(".py")
            if folder in _PYTHON:
                return PYTHON
    return None


def _engine() -> str | None:
    """The folder of torch-lockstep, if the script uses it: a clone is outside site-packages."""
    file = getattr(sys.modules.get("lockstep"), "__file__", None)
    return os.path.dirname(os.path.realpath(file)) if file else None


def _has_packages(folder: str) -> bool:
    """True if Python imports from a folder that an installer has filled."""
    if folder not in sys.path:
        return False
    if os.path.basename(folder) in ("site-packages", "dist-packages"):
        return True
    return os.path.isdir(folder) and any(name.endswith(".dist-info") for name in os.listdir(folder))
