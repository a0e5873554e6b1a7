"""The library that a file of code belongs to, by the real folders of libraries: a user's folders may have any name."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig

LOCKSTEP, PYTHON = "lockstep", "python"
PACKAGES = ("lockstep", "lockstep_recipes", "lockstep_lab")
"""The modules of Lockstep's distributions that take part in a training."""
_PYTHON = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}


@functools.cache
def library_of(file: str) -> str | None:
    """The library of a file: `lockstep`, `python` (the standard library), or the top name of an installed package.

    None: the file is the user's own. So is code without a file, from a notebook or `python -c`.

    Args:
        file: as a code object or a traceback has it.
    """
    if file.startswith("<"):
        return PYTHON if file.startswith("<frozen ") else None
    for path in dict.fromkeys((os.path.abspath(file), os.path.realpath(file))):  # some installers make links
        name, folder = "", path
        while folder != os.path.dirname(folder):
            folder, name = os.path.split(folder)
            if name in PACKAGES and os.path.join(folder, name) in _real_folders():
                return LOCKSTEP
            if _has_packages(folder):
                return name.removesuffix(".py")
            if folder in _PYTHON:
                return PYTHON
    return None


@functools.cache
def lockstep_folders() -> tuple[str, ...]:
    """The folders of Lockstep's packages, as Python finds them. Nothing is imported."""
    specs = (importlib.util.find_spec(name) for name in PACKAGES)
    return tuple(os.path.dirname(os.path.abspath(spec.origin)) for spec in specs if spec is not None and spec.origin)


@functools.cache
def _real_folders() -> frozenset[str]:
    return frozenset(map(os.path.realpath, lockstep_folders()))


def is_own_code(file: str) -> bool:
    """True if a file is a user's own: of no installed library, and not of Lockstep."""
    return library_of(file) is None


def _has_packages(folder: str) -> bool:
    """True if Python imports from a folder that an installer has filled."""
    if folder not in sys.path:
        return False
    if os.path.basename(folder) in ("site-packages", "dist-packages"):
        return True
    return os.path.isdir(folder) and any(name.endswith(".dist-info") for name in os.listdir(folder))
