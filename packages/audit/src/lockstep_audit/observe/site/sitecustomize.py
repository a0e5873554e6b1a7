"""Python imports this when it starts, if `lockstep-audit` put this folder into PYTHONPATH: children are observed."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def _run_the_other() -> None:
    """Run the sitecustomize of the user's environment, which this file hides."""
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_other()
try:
    from lockstep_audit.observe import boot
except ImportError:  # a different Python, without Lockstep
    pass
else:
    boot.activate_from_environment()
