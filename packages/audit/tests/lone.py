"""An environment that has torch, what torch itself needs, the audit, and nothing else: as pip would make it."""

import sys
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from packages.audit.tests.processes import SOURCE


def environment(folder):
    """Make the environment in a folder. Returns its Python."""
    venv.create(folder, symlinks=True)
    place = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for name in distributions("torch"):
        files = metadata.distribution(name).files
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            (place / top).symlink_to(Path(metadata.distribution(name).locate_file(top)).resolve())
    (place / "lockstep_audit").symlink_to(SOURCE / "lockstep_audit")
    return folder / "bin" / "python"


def distributions(name):
    """The names of a distribution and of all that it needs, as far as they are installed."""
    found, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        found.add(one)
        for text in metadata.requires(one) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)
    return found
