"""The folder of what Lockstep computes once per machine, and keeps."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "LOCKSTEP_CACHE"


def cache_root() -> Path:
    """`$LOCKSTEP_CACHE`, or `lockstep` in the user's cache folder. It may be deleted at any time."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"
