"""Starts observing a process: options from the environment, children, and patches once torch is imported."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from lockstep_audit.observe.recorder import LAUNCHER, recorder

FOLDER, EVERY = "LOCKSTEP_AUDIT_FOLDER", "LOCKSTEP_AUDIT_EVERY"
PATIENCE, PROBE = "LOCKSTEP_AUDIT_PATIENCE", "LOCKSTEP_AUDIT_PROBE"
_SITE = str(Path(__file__).resolve().parent / "site")
_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "transformers", "deepspeed", "ignite", "datasets")
_RECORDS = "2000"  # collectives that the flight recorder keeps


class Hook(importlib.abc.MetaPathFinder):
    """Calls functions after modules have been imported."""

    def __init__(self) -> None:
        self._after: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._finding: set[str] = set()

    def after_import(self, name: str, function: Callable[[ModuleType], None]) -> None:
        """Call `function(module)` once the module is imported: immediately if it already is."""
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            recorder.guard(f"import of {name}", function, module)
        else:
            self._after.setdefault(name, []).append(function)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._after or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._watch(fullname, spec.loader)
        return spec

    def _watch(self, name: str, loader: Any) -> None:
        """The loader belongs to this one module, so an attribute of the loader changes nothing else."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            del loader.exec_module
            while functions := self._after.pop(name, []):  # a function may ask for more of the same module
                for function in functions:
                    recorder.guard(f"import of {name}", function, module)

        loader.exec_module = exec_module


hook = Hook()


def activate(folder: Path, *, every: int = 50, patience: float = 60.0, probe: bool = True) -> None:
    """Observe this process and its children.

    Args:
        folder: the folder for events.
        every: after the first 4 steps, every `every`-th is examined.
        patience: seconds without progress after which a process counts as stuck.
        probe: whether samples are read at the end, to compare the data sets of ranks.
    """
    if recorder.folder is not None:
        return
    folder = folder.absolute()
    os.environ |= {FOLDER: str(folder), EVERY: str(every), PATIENCE: str(patience), PROBE: str(int(probe))}
    if LAUNCHER not in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        os.environ[LAUNCHER] = f"{os.environ['TORCHELASTIC_RUN_ID']} {os.environ.get('MASTER_PORT', '')}"
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _SITE not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([_SITE, *filter(None, paths)])
    if not any(name in os.environ for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")):
        os.environ["TORCH_FR_BUFFER_SIZE"] = _RECORDS
    recorder.configure(folder, every, patience, probe)
    os._exit = functools.partial(_leave, os._exit)
    sys.meta_path.insert(0, hook)
    for name in _FRAMEWORKS:
        hook.after_import(name, _note_framework)
    hook.after_import("torch", _install)


on_leave: list[Callable[[int], int]] = []
"""Records the exit code of a script that calls `os._exit`."""


def _leave(leave: Callable[[int], NoReturn], status: int) -> NoReturn:
    """`os._exit`, noted."""
    recorder.note_exit(status, None)
    recorder.guard("exit", recorder.end)
    is_main = recorder.is_main and recorder.process == os.getpid()
    leave(on_leave[0](status) if on_leave and is_main else status)


def activate_from_environment() -> None:
    """Observe this process if its parent was observed."""
    if folder := os.environ.get(FOLDER):
        every, patience = int(os.environ.get(EVERY, "50")), float(os.environ.get(PATIENCE, "60"))
        activate(Path(folder), every=every, patience=patience, probe=os.environ.get(PROBE) != "0")
        sys.exit = _exit  # nothing else sees the code of a process that only Python runs


def _exit(status: Any = None) -> NoReturn:
    """`sys.exit`, recorded. mp.spawn calls it when it handles an error of the script."""
    recorder.note_exit(status, sys.exc_info()[1])
    raise SystemExit(status)


def _note_framework(module: ModuleType) -> None:
    recorder.emit("framework", name=module.__name__, version=str(getattr(module, "__version__", "")))


def _install(module: ModuleType) -> None:
    importlib.import_module("lockstep_audit.observe.torch_private").install(hook.after_import)
