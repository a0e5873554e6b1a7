"""The run directory: who may train in it, and what is kept in it besides checkpoints and logs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep import atomic, config_file, devices, locks
from lockstep.checkpoint import store
from lockstep.checkpoint.store import Retention
from lockstep.config import RunConfig, training_keys
from lockstep.distributed.launch import LOST_NODE, RESTARTS
from lockstep.distributed.world import World
from lockstep.errors import LockstepError, UsageError, did_you_mean
from lockstep.observe import metric_arrays, model_table
from lockstep.observe.factory import files_of_writers
from lockstep.tasks import source_code
from lockstep.tasks.task import Task

_MICRO_BATCH = "micro.json"
_OURS = (
    "checkpoints",
    "config.yaml",
    "environment.json",
    _MICRO_BATCH,
    "task",
    "source",
    metric_arrays.FILE,
    model_table.FILE,
    "samples",
    "pictures",
    "profile",
    "memory",
    "report.html",
)
_HANG_REPORTS = "hang-*.txt"
DESCRIBING = ("config.yaml", "environment.json", "task", "source", model_table.FILE, "train.log", "metrics.jsonl")
"""Files and folders that describe a run. With a checkpoint they are a run directory that can be evaluated."""
# Keys that change the length of the schedule's curve.
SCHEDULE_LENGTH_KEYS = ("train.steps", "train.epochs", "train.min_steps", "schedule.total_steps")
# Environment variables that change how ranks communicate, which GPUs they see, and how memory is allocated.
_VARIABLES = re.compile(r"(TORCH_)?NCCL_|CUDA_|CUBLAS_|HIP_|ROCR_|PYTORCH_.*ALLOC_CONF$|OMP_NUM_THREADS$")
_DYING_S = 20.0  # how long the ranks of an earlier launch may take to end


@contextlib.contextmanager
def claim(
    folder: Path, config: RunConfig, world: World, fresh: bool, allow_change: Sequence[str] = ()
) -> Iterator[RunConfig]:
    """Make `folder` the run directory of `config`, or check that it is, and keep other processes out. Rank 0 decides.

    Args:
        fresh: delete what an earlier run left in the folder.
        allow_change: keys (or beginnings of keys, such as `optim`) that may differ from the run's.

    Yields:
        the config with its global batch as a number: the number that the first launch recorded.

    Raises:
        UsageError: the folder belongs to a run with other training keys (names the keys), cannot be written, or
            another process trains in it.
    """
    with contextlib.ExitStack() as held:
        yield world.on_rank0(lambda: _claim(folder, config, world, fresh, allow_change, held))


def _claim(
    folder: Path, config: RunConfig, world: World, fresh: bool, allow_change: Sequence[str], held: contextlib.ExitStack
) -> RunConfig:
    try:
        held.enter_context(locked(folder, tell=_tell_of_wait if _patience_s() > _DYING_S else None))
        logs = files_of_writers(config.log.writers)  # an error in the config is found before anything is deleted
        with contextlib.suppress(UsageError):
            logs |= files_of_writers(config_file.read_run(folder).log.writers)
        if fresh and not _was_restarted(folder):
            ours = [*(folder / name for name in (*_OURS, *logs)), *folder.glob(_HANG_REPORTS)]
            _check_first_weights_stay(folder, config, ours)
            for path in ours:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        store.clear_leftovers(folder / "checkpoints")
        resolved = config.model_copy(update={"batch": config.batch.resolve(world.data_size)})
        if any((folder / "checkpoints").glob("step-*")):
            resolved = _same_training(folder, config, resolved, allow_change)
        atomic.write_text(folder / "config.yaml", config_file.to_yaml(resolved))
        about = {"task": _recorded(folder).get("task"), "git": source_code.commit(_home(config))}
        atomic.write_text(folder / "environment.json", json.dumps(_environment(world) | about, indent=1))
    except OSError as error:
        raise _unwritable(folder, error) from error
    return resolved


def _check_first_weights_stay(folder: Path, config: RunConfig, deleted: Sequence[Path]) -> None:
    """Check that `--fresh` does not delete the weights with which the new run is to begin."""
    if config.train.init_from is None:
        return
    source, checkpoints = Path(config.train.init_from).expanduser().resolve(), (folder / "checkpoints").resolve()
    of_this_run = source == folder.resolve() and checkpoints.is_dir()
    if of_this_run or any(source.is_relative_to(path.resolve()) for path in deleted):
        raise UsageError(
            f"{config.train.init_from} belongs to the run that --fresh would delete",
            where="train.init_from",
            remedy="give the new run another place with --run-dir, or export the weights to another folder first",
        )


def _unwritable(folder: Path, error: OSError) -> UsageError:
    where = str(error.filename or folder)
    return UsageError(f"cannot write: {error.strerror}", where=where, remedy="choose another place with --run-dir")


@contextlib.contextmanager
def locked(folder: Path, name: str = ".lock", tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """Keep other processes that ask for the same `name` out of `folder`, which is made if it is not there.

    Args:
        tell: gets the name of the other process, if there is one, before the wait for its end begins.

    Raises:
        UsageError: another process holds the lock, or the folder cannot be written.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locks.locked(folder / name, wait_s=_patience_s(), poll_s=0.2, tell=tell))
        except locks.LockedError as error:
            remedy = "wait for it, stop it, or give another --run-dir"
            raise UsageError(f"in use by {error}", where=str(folder), remedy=remedy) from None
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield


def _patience_s() -> float:
    """How long to wait for the ranks of an earlier launch, or of a node that was lost, in seconds."""
    return float(os.environ.get(LOST_NODE, _DYING_S))


def _tell_of_wait(holder: str) -> None:
    text = f"waiting for {holder}, which still has the run directory, for {_patience_s():g} s at most"
    print(text, file=sys.stderr, flush=True)


def _was_restarted(folder: Path) -> bool:
    """Whether this is a restart within one launch. The first start has then followed --fresh already."""
    begun = _recorded(folder).get("launch")
    return _restarts() > 0 and begun is not None and begun == os.environ.get("TORCHELASTIC_RUN_ID")


def _recorded(folder: Path) -> dict[str, Any]:
    """The content of environment.json; empty if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        about = json.loads((folder / "environment.json").read_text())
        return about if isinstance(about, dict) else {}
    return {}


def git_commit(folder: Path) -> dict[str, Any] | None:
    """What the run directory says on the git commit of the task's code: `commit` and `dirty`. None: not in git."""
    return _recorded(folder).get("git")


def _restarts() -> int:
    return int(os.environ.get(RESTARTS, 0)) + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def _same_training(folder: Path, config: RunConfig, resolved: RunConfig, allow_change: Sequence[str]) -> RunConfig:
    """`resolved`, if its training keys are those that the folder records, but for the keys in `allow_change`."""
    if not (folder / "config.yaml").exists():
        raise UsageError(
            "the folder has checkpoints, but no config.yaml that says what they belong to",
            where=str(folder),
            remedy="bring the file back, or give --fresh to delete the checkpoints",
        )
    recorded = config_file.read_run(folder)
    if config.batch.per_rank:  # another number of ranks keeps the global batch of the first launch
        batch = recorded.batch.model_copy(update={"micro": config.batch.per_rank})
        resolved = resolved.model_copy(update={"batch": batch})
    old, new = _as_json(training_keys(recorded)), _as_json(training_keys(resolved))
    keys = old.keys() | new.keys()
    changed = {key for key in keys if old.get(key) != new.get(key)}
    changed -= _allowed(allow_change, {*keys, *SCHEDULE_LENGTH_KEYS, "data", "task"})
    if changed:
        differences = [f"{key}: {old.get(key)!r} there, {new.get(key)!r} here" for key in sorted(changed)]
        raise UsageError(
            "\n    ".join(["the run directory belongs to a run with another config:", *differences]),
            where=str(folder),
            remedy="give the same values, --allow-change KEY to go on with another value, another --run-dir, "
            "or --fresh to delete that run and start anew",
        )
    return resolved


def _as_json(keys: dict[str, Any]) -> dict[str, Any]:
    """With lists in the place of tuples, as config.yaml has them."""
    same: dict[str, Any] = json.loads(json.dumps(keys))
    return same


def _allowed(allow_change: Sequence[str], known: set[str]) -> set[str]:
    """The keys that `allow_change` names, or of which it names the beginning.

    Raises:
        UsageError: no key has this name or beginning.
    """
    found: set[str] = set()
    for allowed in allow_change:
        keys = {key for key in known if f"{key}.".startswith(f"{allowed}.")}
        if not keys:
            raise UsageError(
                f"no key that determines the training is called {allowed!r}",
                where="--allow-change",
                remedy=f"{did_you_mean(allowed, known)}There are: {', '.join(sorted(known))}",
            )
        found |= keys
    return found


def is_verified(folder: Path, config: RunConfig) -> bool:
    """Whether `verify.json` in `folder` tells of a training with the training keys of `config`."""
    try:
        written = json.loads((folder / "verify.json").read_text())
        verified = config_file.parse(written["config"], needs_task=False)
    except (OSError, ValueError, LookupError, TypeError, LockstepError):  # there is none, or another version wrote it
        return False
    return _as_json(training_keys(verified)) == _as_json(training_keys(config))


def _home(config: RunConfig) -> Path:
    """The folder of the task's file; for a task without a file, the working directory."""
    path, is_file, _ = str(config.task.get("kind", "")).rpartition(".py:")
    return Path(path).parent if is_file else Path()


def keep_source(folder: Path, task: Task, config: RunConfig, world: World, allow_change: Sequence[str]) -> list[str]:
    """Keep the task's source with a new run. For a run that goes on, compare the source with the kept source.

    Rank 0 does this for all ranks.

    Returns:
        messages for the log.

    Raises:
        UsageError: the task's code has changed, and `allow_change` does not have `task`.
    """

    def keep() -> list[str]:
        begun = any((folder / "checkpoints").glob("step-*"))
        kept = source_code.read(folder / "source") if begun else {}
        found = source_code.of_task(task, config.task.get("kind"), kept)
        if kept and not found:
            return ["the source of the task cannot be read, so it cannot be compared with the source of the run"]
        change = source_code.difference(kept, found) if kept else None
        if change and "task" not in allow_change:
            raise UsageError(
                f"the task's code has changed since the run began: {change}",
                where=str(folder),
                remedy="undo the change, or give --allow-change task to go on with it, another --run-dir, "
                "or --fresh to delete that run",
            )
        try:
            if kept != found:
                source_code.write(folder / "source", source_code.of_task(task, config.task.get("kind")))
            about = _recorded(folder) | {"task": source_code.digest(found) if found else None}
            atomic.write_text(folder / "environment.json", json.dumps(about, indent=1))
        except OSError as error:
            raise _unwritable(folder, error) from error
        return [f"warning: the task's code has changed: {change}"] if change else []

    return world.on_rank0(keep)


def changed_source(folder: Path, task: Task, config: RunConfig) -> list[str]:
    """A warning if the task's code has changed since the run was trained."""
    kept = source_code.read(folder / "source")
    found = source_code.of_task(task, config.task.get("kind"), kept)
    change = source_code.difference(kept, found) if kept and found else None
    return [f"warning: the task's code has changed since the run was trained: {change}"] if change else []


def remember_micro_batch(
    folder: Path, world: World, *, asked: list[list[int]], size: int, from_any_rank: bool = False
) -> None:
    """Note that micro-batches of more than `size` samples do not fit into memory on this number of ranks.

    Args:
        asked: the sizes that the config asks for, see `build.asked_micro_batches`. For other sizes, or another number
            of ranks, the note is ignored.
        from_any_rank: this rank writes, whichever it is. Otherwise rank 0 writes.
    """
    if world.rank == 0 or from_any_rank:
        with contextlib.suppress(OSError):  # a full disk is no reason to end a training
            note = {"asked": asked, "world": world.size, "micro": size}
            atomic.write_text(folder / _MICRO_BATCH, json.dumps(note))


def remembered_micro_batch(folder: Path, world: World, *, asked: list[list[int]]) -> int:
    """The largest micro-batch, in samples: the largest in `asked`, or a smaller size that an earlier start noted.

    It is the same on all ranks.
    """
    note = None
    if world.rank == 0:
        with contextlib.suppress(OSError, ValueError):
            note = json.loads((folder / _MICRO_BATCH).read_text())
    note = world.broadcast(note)
    counts = isinstance(note, dict) and (note.get("asked"), note.get("world")) == (asked, world.size)
    largest = max(size for _, size in asked)
    return min(largest, max(1, int(note["micro"]))) if counts else largest


def retention(config: RunConfig) -> Retention:
    """Which checkpoints the config keeps."""
    keep = config.checkpoint
    best = keep.keep_best.split() if keep.keep_best else None
    return Retention(keep.keep_last, (best[0], best[1]) if best else None, keep.keep_every_steps)


def _environment(world: World) -> dict[str, Any]:
    device = devices.of(world.device).name()
    versions = {"lockstep": lockstep.__version__, "torch": torch.__version__, "python": platform.python_version()}
    versions["launch"] = os.environ.get("TORCHELASTIC_RUN_ID", "")
    about: dict[str, Any] = {"world": world.size, "device": device, "host": platform.node(), "command": sys.argv}
    about |= {"cpus": os.cpu_count(), "device_memory": devices.of(world.device).memory()}
    variables = {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)}
    return versions | devices.of(world.device).libraries() | about | {"variables": variables}
