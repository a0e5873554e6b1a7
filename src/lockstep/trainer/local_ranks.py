"""Ranks on this machine: how many, what they import, and a training on ranks that a script or a notebook starts.

Importing this module loads no torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core import debugging, shortages, this_process
from lockstep.core.errors import LockstepError, Preempted, UsageError, described, exits_are_failures

if TYPE_CHECKING:
    from lockstep.core.config.sections import RunConfig
    from lockstep.core.task import Task
    from lockstep.trainer.assemble import Setup

_OUTPUT, _TRAINING, _RESULTS = "output.txt", "training.pickle", "results.json"
_LOOK_EVERY_S = 0.1


# ---- how many, and what they import


MODULES = (
    "pydantic.type_adapter",
    "lockstep.configs.config_file",
    "lockstep.trainer.trainer",
    "lockstep.parts.writers.console",
    "lockstep.parts.writers.json_lines",
    "lockstep.parts.writers.text_log",
    "rich.console",
)
"""The modules that the ranks of each training import until their first step, besides torch."""


def modules_of(settings: RunConfig) -> list[str]:
    """Modules that the ranks of a training import until their first step, besides torch."""
    from lockstep.configs import registry

    modules = [*MODULES, *registry.preload_modules(settings.task.get("kind", ""))]
    if settings.data.eval or settings.train.eval_every_epochs or settings.train.eval_every_steps:
        modules += ["torchmetrics"]
    if "tensorboard" in settings.log.writers:
        modules += ["torch.utils.tensorboard"]
    return modules


def check_nproc(nproc: str, where: str = "--nproc") -> None:
    """Check a number of ranks as text.

    Raises:
        UsageError: it is neither a number from 1 nor `auto`.
    """
    if nproc != "auto" and (not (nproc.isascii() and nproc.isdigit()) or int(nproc) < 1):
        raise UsageError(f"{nproc!r} is not a number of ranks", where=where, remedy="use a number from 1, or auto")


def ranks_of(nproc: str, where: str = "--nproc") -> int:
    """The number of ranks that `nproc` means: a number, or `auto` for a rank for each GPU. Warns of too many.

    Raises:
        UsageError: see `check_nproc`.
    """
    check_nproc(nproc, where)
    if nproc != "auto":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if int(nproc) > cores:
            what = f"warning: {nproc} ranks on {cores} CPU cores slow each other down"
            print(f"{what}; --nproc {cores} gives each rank a core", file=sys.stderr, flush=True)
        return int(nproc)
    from lockstep.core import devices

    return max(1, devices.gpus())


# ---- a training on ranks that a script or a notebook starts


def fit(
    setup: Setup,
    task: Task | None,
    *,
    main: Callable[[Sequence[str]], None],
    nproc: int | str,
    max_restarts: int,
) -> dict[str, float]:
    """Train as `Trainer.fit(task)` would, on ranks that this process starts. Wait for their end.

    What the ranks print is printed here. Environment variables and signal handlers are as before afterwards.

    Args:
        main: the main function of a rank. It calls `run_rank` with its arguments.
        nproc: the number of ranks; `auto`: a rank for each GPU.
        max_restarts: how often the ranks are started again after one was killed or has crashed.

    Returns:
        the last logged value of each name.

    Raises:
        UsageError: this process is a rank itself, or the task cannot be sent to other processes.
        RankError: a rank failed. Names the rank, and has its message.
        Preempted: Ctrl-C, the stop button of a notebook or a signal asked to stop; the state was saved.
        KeyboardInterrupt: Ctrl-C was pressed again, and the ranks were killed.
    """
    if this_process.is_rank():
        raise UsageError(
            "this process is a rank itself, and cannot start ranks",
            where="fit(nproc=...)",
            remedy="leave nproc out under torchrun, which starts the ranks",
        )
    ranks = ranks_of(str(nproc), "fit(nproc=...)")
    options = {name: getattr(setup, name) for name in ("run_dir", "fresh", "allow_change", "quiet", "parts")}
    from lockstep.launch import launcher
    from lockstep.parts import live_line

    with shortages.temporary_folder("lockstep-fit-") as folder, _as_it_was():
        is_terminal = sys.stdout.isatty() and sys.stdout is sys.__stdout__  # which no notebook has captured
        _write_training(folder, setup.config, task, options, prints_to_file=not is_terminal)
        if "ipykernel" in sys.modules and not is_terminal:
            os.environ[live_line.VARIABLE] = "1"
        sys.stdout.flush()
        launcher.prepare(ranks, modules=modules_of(setup.config))
        with contextlib.nullcontext() if is_terminal else _shown(folder / _OUTPUT):
            launcher.launch([str(folder)], ranks, max_restarts, main=main, ends_process=False)
        results: dict[str, float] = json.loads((folder / _RESULTS).read_text())
        return results


def run_rank(
    arguments: Sequence[str], train: Callable[[RunConfig, Task | None, dict[str, Any]], dict[str, float]]
) -> None:
    """Train in a rank that `fit` started, and report what became of it.

    Args:
        arguments: the folder that `fit` has prepared.
        train: gets the config, the task and arguments of `Trainer`. Returns the results.
    """
    folder = Path(arguments[0])
    from lockstep.core.parallel import signals
    from lockstep.core.parallel.launched import report_failure

    try:
        with exits_are_failures(), signals.listening():
            with (folder / _TRAINING).open("rb") as file:
                _take_place(folder, pickle.load(file))
                config, task, parts, options = pickle.load(file)
            from lockstep.trainer import source_code

            if task is not None:
                source_code.know(type(task), parts)
                _define(type(task))
            results = train(config, task, options)
        if this_process.is_first():
            (folder / _RESULTS).write_text(json.dumps(results))
    except Preempted as stopped:
        report_failure(stopped, str(stopped))
        sys.exit(stopped.exit_code)
    except Exception as raised:
        error = shortages.explanation(raised) or debugging.explanation(raised) or raised
        report_failure(error, str(error) if isinstance(error, LockstepError) else described(error))
        sys.exit(error.exit_code if isinstance(error, LockstepError) else 1)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()


def _write_training(
    folder: Path, config: RunConfig, task: Task | None, options: dict[str, Any], *, prints_to_file: bool
) -> None:
    """Write what a rank needs to know: first the place that it works in, then the training."""
    from lockstep.trainer import source_code

    cells = {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not os.path.exists(name)  # code that is in no file
    }
    place = {"cwd": os.getcwd(), "path": list(sys.path), "cells": cells, "prints_to_file": prints_to_file}
    parts = source_code.of_task(task, config.task.get("kind")) if task is not None else {}
    with (folder / _TRAINING).open("wb") as file:
        pickle.dump(place, file)
        _dump((config, task, parts, options), file, task, options.get("parts", ()))


def _take_place(folder: Path, place: dict[str, Any]) -> None:
    """Work where the process works that started this rank, and print where it reads."""
    os.chdir(place["cwd"])
    sys.path[:] = place["path"]
    linecache.cache.update(place["cells"])
    if place["prints_to_file"]:
        with (folder / _OUTPUT).open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _define(kind: type) -> None:
    """Give this process's main module the classes and functions of a notebook or script that came with a task.

    Loader workers and other ranks send objects by the names of their classes.
    """
    main = vars(sys.modules["__main__"])
    own = [base for base in kind.__mro__ if base.__module__ == "__main__"]
    for base in own:
        main[base.__name__] = base
        for member in vars(base).values():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            for name, value in getattr(function, "__globals__", {}).items():
                if getattr(value, "__module__", None) == "__main__" and hasattr(value, "__qualname__"):
                    main.setdefault(name, value)
    if own and "fork" in multiprocessing.get_all_start_methods() and sys.platform == "linux":
        multiprocessing.set_start_method("fork", force=True)  # of loader workers: others would look for the script


def _dump(training: tuple[Any, ...], file: io.BufferedWriter, task: Task | None, joined: Sequence[object]) -> None:
    """Pickle the training. Classes of a notebook or a script travel as code.

    Raises:
        UsageError: something of the task, or of a Part, cannot be pickled. Names it.
    """
    dump: Callable[[Any], bytes] = pickle.dumps
    try:
        import cloudpickle

        dump = cloudpickle.dumps
    except ImportError:
        local = next((one for one in (task, *joined) if type(one).__module__ == "__main__"), None)
        if local is not None:
            raise UsageError(
                "a class of a notebook or a script reaches the ranks only with the package cloudpickle",
                where=f"class {type(local).__name__}",
                remedy="pip install cloudpickle, or write the class into a file and import it",
            ) from None
    try:
        file.write(dump(training))
    except Exception as error:  # whatever an object's own code for pickling raises
        part = next((one for one in joined if not _is_sent(one, dump)), None)
        raise _not_sent("task" if part is None else "Part", task if part is None else part, error, dump) from error


def _is_sent(value: object, dump: Callable[[Any], bytes]) -> bool:
    try:
        return bool(dump(value))
    except Exception:
        return False


def _not_sent(word: str, sent: object, error: Exception, dump: Callable[[Any], bytes]) -> UsageError:
    where = f"class {type(sent).__name__}"
    for name, value in (getattr(sent, "__dict__", None) or {}).items():
        if not _is_sent(value, dump):
            where = f"{type(sent).__name__}.{name}, of type {type(value).__name__}"
            break
    return UsageError(
        f"the {word} cannot be sent to the ranks: {error}",
        where=where,
        remedy="make open files, connections, locks, threads and generators in setup, train_data or model, which the "
        "ranks call, and not in the constructor or in a global variable of the notebook",
    )


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Afterwards, environment variables and signal handlers are as before. They say that this process is a launcher."""
    from lockstep.core.parallel.signals import ASKING

    before = dict(os.environ)
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in ASKING} if is_main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _shown(path: Path) -> Iterator[None]:
    """Print what is written into the file at `path`, while it is written."""
    path.touch()
    done = threading.Event()
    out = sys.stdout

    def follow() -> None:
        with path.open("r", encoding="utf-8", errors="replace", newline="") as file:
            while True:
                is_last = done.is_set()
                if text := file.read():
                    with contextlib.suppress(Exception):  # nobody may read it; the training continues
                        out.write(text)
                        out.flush()
                if is_last:
                    return
                done.wait(_LOOK_EVERY_S)

    thread = threading.Thread(target=follow, name="lockstep-output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
