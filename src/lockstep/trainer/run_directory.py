"""The run directory: who may train in it, and what is kept in it besides checkpoints and logs."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep import locks
from lockstep.configs import config_file
from lockstep.core import atomic, devices, run_folder
from lockstep.core.checkpoint import store
from lockstep.core.config.sections import RunConfig, training_keys
from lockstep.core.errors import LockstepError, UsageError, did_you_mean
from lockstep.core.parallel import equal_bits
from lockstep.core.parallel.launched import LOST_NODE, RESTARTS
from lockstep.core.parallel.world import World
from lockstep.core.resume import SCHEDULE_LENGTH_KEYS

# Environment variables that change how ranks communicate, which GPUs they see, and how memory is allocated.
_VARIABLES = re.compile(r"(TORCH_)?NCCL_|CUDA_|CUBLAS_|HIP_|ROCR_|PYTORCH_.*ALLOC_CONF$|OMP_NUM_THREADS$")
_DYING_S = 20.0  # how long the ranks of an earlier launch may take to end


@contextlib.contextmanager
def claim(
    folder: Path,
    config: RunConfig,
    world: World,
    fresh: bool,
    allow_change: Sequence[str] = (),
    *,
    written_by: Callable[[Sequence[str]], set[str]] = set,
) -> Iterator[RunConfig]:
    """Make `folder` the run directory of `config`, or check that it is, and keep other processes out. Rank 0 decides.

    The record of a run with checkpoints stays as it is until `keep_record`: a start that fails before has changed
    nothing, and the command that the run had before still resumes it.

    Args:
        fresh: delete what an earlier run left in the folder.
        allow_change: keys (or beginnings of keys, such as `optim`) that may differ from the run's.
        written_by: the files that writers of these names write, which `fresh` deletes, too.

    Yields:
        the config with its global batch as a number: the number that the first launch recorded.

    Raises:
        UsageError: the folder belongs to a run with other training keys (names the keys), holds something else than a
            run, cannot be written, or another process trains in it.
    """
    with contextlib.ExitStack() as held:
        yield world.on_rank0(lambda: _claim(folder, config, world, fresh, allow_change, written_by, held))


def _claim(
    folder: Path,
    config: RunConfig,
    world: World,
    fresh: bool,
    allow_change: Sequence[str],
    written_by: Callable[[Sequence[str]], set[str]],
    held: contextlib.ExitStack,
) -> RunConfig:
    try:
        run_folder.check_free(folder)  # first: a folder that is not ours must not even get a lock
        held.enter_context(locked(folder, tell=_tell_of_wait if _patience_s() > _DYING_S else None))
        logs = written_by(config.log.writers)  # an error in the config is found before anything is deleted
        with contextlib.suppress(UsageError):
            logs |= written_by(config_file.read_run(folder).log.writers)
        if fresh and not _was_restarted(folder) and run_folder.is_run(folder):
            _check_first_weights_stay(folder, config, run_folder.ours(folder, logs))
            run_folder.delete_ours(folder, logs)
        store.clear_leftovers(folder / "checkpoints")
        _put_task_back(folder)  # a start was killed that had not kept its record
        resolved = config.model_copy(update={"batch": config.batch.resolve(world.data_size)})
        if has_checkpoints(folder):
            resolved = _same_training(folder, config, resolved, allow_change)
            if allow_change:
                _keep_task_as_it_is(folder)
                held.callback(_put_task_back, folder)
        else:
            write_environment(folder, world, {"run": uuid.uuid4().hex})
            atomic.write_text(folder / "config.yaml", config_file.to_yaml(resolved))
    except OSError as error:
        raise unwritable(folder, error) from error
    return resolved


def has_checkpoints(folder: Path) -> bool:
    """True if the run in `folder` has saved a state."""
    found = (folder / "checkpoints").glob("step-*")
    return any(re.fullmatch(run_folder.OURS["checkpoints"], path.name) for path in found)


def write_environment(folder: Path, world: World, more: Mapping[str, Any]) -> None:
    """Write environment.json: where the run runs, and `more`."""
    atomic.write_text(folder / run_folder.MARKER, json.dumps(_environment(world) | dict(more), indent=1))


def _keep_task_as_it_is(folder: Path) -> None:
    """Copy what the task keeps: a changed task may write other files before it is known that the run resumes."""
    with atomic.staged_folder(folder / run_folder.TASK_BEFORE) as staging:
        if (folder / "task").is_dir():
            shutil.copytree(folder / "task", staging, dirs_exist_ok=True)


def _put_task_back(folder: Path) -> None:
    """Undo what a start has written into the folder `task`, unless the run has resumed since then."""
    before = folder / run_folder.TASK_BEFORE
    if before.is_dir():
        with contextlib.suppress(OSError):  # the next claim tries it again
            atomic.remove(folder / "task")
            before.rename(folder / "task")
            (folder / "task").rmdir()  # if it is empty


def _check_first_weights_stay(folder: Path, config: RunConfig, deleted: Sequence[Path]) -> None:
    """Check that `--fresh` does not delete the weights with which the new run is to begin."""
    if config.train.init_from is None:
        return
    source, checkpoints = Path(config.train.init_from).expanduser().resolve(), (folder / "checkpoints").resolve()
    of_this_run = source in (folder.resolve(), checkpoints) and checkpoints.is_dir()
    if of_this_run or any(source.is_relative_to(path.resolve()) for path in deleted):
        raise UsageError(
            f"{config.train.init_from} belongs to the run that --fresh would delete",
            where="train.init_from",
            remedy="give the new run another place with --run-dir, or export the weights to another folder first",
        )


def unwritable(folder: Path, error: OSError) -> UsageError:
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
            raise unwritable(folder, error) from error
        yield


def _patience_s() -> float:
    """The time to wait for the ranks of an earlier launch, or of a node that was lost, in seconds."""
    return float(os.environ.get(LOST_NODE, _DYING_S))


def _tell_of_wait(holder: str) -> None:
    text = f"waiting for {holder}, which still has the run directory, for {_patience_s():g} s at most"
    print(text, file=sys.stderr, flush=True)


def _was_restarted(folder: Path) -> bool:
    """True if this is a restart within one launch. The first start has then followed --fresh already."""
    begun = run_folder.recorded(folder).get("launch")
    restarts = int(os.environ.get(RESTARTS, 0)) + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return restarts > 0 and begun is not None and begun == os.environ.get("TORCHELASTIC_RUN_ID")


def _same_training(folder: Path, config: RunConfig, resolved: RunConfig, allow_change: Sequence[str]) -> RunConfig:
    """`resolved`, if its training keys are those that the folder records, but for the keys in `allow_change`."""
    if not (folder / "config.yaml").exists():
        raise UsageError(
            "the folder has checkpoints, but no config.yaml that says what they belong to",
            where=str(folder),
            remedy="bring the file back, or give --fresh to delete the checkpoints",
        )
    recorded = config_file.read_run(folder)
    if config.batch.per_rank:  # a different number of ranks keeps the global batch of the first launch
        batch = recorded.batch.model_copy(update={"micro": config.batch.per_rank})
        resolved = resolved.model_copy(update={"batch": batch})
    old, new = _as_json(training_keys(recorded)), _as_json(training_keys(resolved))
    keys = old.keys() | new.keys()
    changed = {key for key in keys if old.get(key) != new.get(key)}
    changed -= _allowed(allow_change, {*keys, *SCHEDULE_LENGTH_KEYS, "batch.micro", "data", "task"})
    if changed:
        differences = [f"{key}: {old.get(key)!r} there, {new.get(key)!r} here" for key in sorted(changed)]
        raise UsageError(
            "\n    ".join(["the run directory belongs to a run with a different config:", *differences]),
            where=str(folder),
            remedy="give the same values, --allow-change KEY to continue with the new value, a different --run-dir, "
            "or --fresh to delete that run and start again",
        )
    return resolved


def _as_json(keys: dict[str, Any]) -> dict[str, Any]:
    """With lists instead of tuples, as config.yaml has them."""
    same: dict[str, Any] = json.loads(json.dumps(keys))
    return same


def _allowed(allow_change: Sequence[str], known: set[str]) -> set[str]:
    """The keys that `allow_change` names in full or by their beginning.

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
    """True if `verify.json` in `folder` describes a training with the training keys of `config`."""
    try:
        verified = config_file.parse(json.loads((folder / "verify.json").read_text())["config"], needs_task=False)
    except (OSError, ValueError, LookupError, TypeError, LockstepError):  # there is none, or another version wrote it
        return False
    return _as_json(training_keys(verified)) == _as_json(training_keys(config))


def _environment(world: World) -> dict[str, Any]:
    device = devices.of(world.device).name()
    versions = {"lockstep": lockstep.__version__, "torch": torch.__version__, "python": platform.python_version()}
    versions["launch"] = os.environ.get("TORCHELASTIC_RUN_ID", "")
    about: dict[str, Any] = {"world": world.size, "device": device, "host": platform.node(), "command": sys.argv}
    about |= {"kind": equal_bits.kind(world.device), "fuses_adam": True}
    about |= {"executable": sys.executable, "folder": str(Path.cwd()), "libraries": libraries()}
    about["python_path"] = os.environ.get("PYTHONPATH", "")
    about |= {"cpus": os.cpu_count(), "device_memory": devices.of(world.device).memory()}
    variables = {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)}
    return versions | devices.of(world.device).libraries() | about | {"variables": variables}


def libraries() -> dict[str, str]:
    """The versions of the libraries that this process has imported."""
    found = {name: getattr(module, "__dict__", {}).get("__version__") for name, module in sys.modules.items()}
    others = {name: version for name, version in found.items() if "." not in name and isinstance(version, str)}
    return {name: others[name] for name in sorted(others.keys() - sys.stdlib_module_names)}
