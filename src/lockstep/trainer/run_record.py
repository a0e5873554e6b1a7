"""The record of a run in its directory: the source of its task, and its config. A resumed run is compared with it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lockstep.configs import config_file
from lockstep.core import atomic, optimizer_class, run_folder
from lockstep.core.build import Run
from lockstep.core.checkpoint import manifest
from lockstep.core.config.sections import RunConfig, config_digest
from lockstep.core.errors import UsageError, number_of
from lockstep.core.parallel import equal_bits
from lockstep.core.parallel.world import World
from lockstep.core.task import Task
from lockstep.trainer import earlier_configs, source_code
from lockstep.trainer.run_directory import has_checkpoints, unwritable, write_environment


def git_commit(config: RunConfig, world: World) -> dict[str, Any] | None:
    """The git commit of the task's code: `commit` and `dirty`. None: not in git. Rank 0 looks for all ranks."""
    return world.on_rank0(lambda: source_code.commit(_home(config)))


def _home(config: RunConfig) -> Path:
    """The folder of the task's file; for a task without a file, the working directory."""
    path, is_file, _ = str(config.task.get("kind", "")).rpartition(".py:")
    return Path(path).parent if is_file else Path()


def check_source(folder: Path, task: Task, config: RunConfig, world: World, allow_change: Sequence[str]) -> list[str]:
    """For a resumed run, compare the task's source with the kept source. Rank 0 does this for all ranks.

    Returns:
        messages for the log.

    Raises:
        UsageError: the task's code has changed, and `allow_change` does not have `task`.
    """

    def check() -> list[str]:
        kept = source_code.read(folder / "source") if has_checkpoints(folder) else {}
        found = source_code.of_task(task, config.task.get("kind"), kept)
        if kept and not found:
            return ["the source of the task cannot be read, so it cannot be compared with the source of the run"]
        change = source_code.difference(kept, found) if kept else None
        if change and "task" not in allow_change:
            raise UsageError(
                f"the task's code has changed since the run began: {change}",
                where=str(folder),
                remedy="undo the change, or give --allow-change task to continue with it, a different --run-dir, "
                "or --fresh to delete that run",
            )
        return [f"warning: the task's code has changed: {change}"] if change else []

    return world.on_rank0(check)


def keep(run: Run, git: Mapping[str, Any] | None) -> None:
    """Write what a run is: its id, the source of its task, its config, and where it runs. Rank 0 does this for all.

    It is called when the state of the run is loaded and all checks are made, before the first step. A kill in between
    leaves files of this start and of the start before. The command of this start is then still accepted.

    Args:
        git: of `git_commit`.

    Raises:
        UsageError: the folder cannot be written.
    """

    folder, kind = run.folder, run.config.task.get("kind")

    def keep() -> str:
        kept = source_code.read(folder / "source") if has_checkpoints(folder) else {}
        found = source_code.of_task(run.task, kind, kept)
        about = {"task": source_code.digest(found) if found else None, "git": git}
        if kept and not found:
            about["task"] = run_folder.recorded(folder).get("task")
        about |= _identity(run)
        try:
            if kept != found and (found or not kept):
                source_code.write(folder / "source", source_code.of_task(run.task, kind))
            earlier_configs.keep(folder, run.config, run.first_step)
            atomic.write_text(folder / "config.yaml", config_file.to_yaml(run.config))
            write_environment(folder, run.world, about)
            atomic.remove(folder / run_folder.TASK_BEFORE)
        except OSError as error:
            raise unwritable(folder, error) from error
        return str(about["run"])

    run.id = run.world.on_rank0(keep)


def _identity(run: Run) -> dict[str, Any]:
    """What `resume` compares checkpoints with: the id of the run, and the digests of all configs that it trained with.

    A run of an earlier version has neither. Then its checkpoints say which digests it had.
    """
    recorded = run_folder.recorded(run.folder)
    digests = recorded.get("configs")
    if digests is None:
        digests = [one.manifest.get("config") for one in manifest.listed(run.folder / "checkpoints")]
    digests = {config_digest(run.config), *filter(None, digests)}
    return {"run": recorded.get("run") or uuid.uuid4().hex, "configs": sorted(digests)}


def differences(folder: Path, task: Task, config: RunConfig, world: World) -> list[str]:
    """On rank 0: why steps that are made again may have other numbers than the log of the run."""
    if world.rank:
        return []
    ranks = run_folder.recorded(folder).get("world", world.size)
    then = number_of(ranks, "rank")
    text = f"note: the run was trained on {then}, where random numbers of a forward pass, such as dropout, differ: "
    text += f"--nproc {ranks} gives the numbers of the log"
    differs = ranks != world.size and world.virtual_ranks is None
    return [*changed_source(folder, task, config), *([text] if differs else [])]


def changed_kind(folder: Path, world: World) -> list[str]:
    """A note if a run with virtual ranks resumes on a different kind of device, whose kernels round differently."""
    if world.virtual_ranks is None:
        return []
    then, now = run_folder.recorded(folder).get("kind"), equal_bits.kind(world.device)
    if then in (None, now):
        return []
    return [f"note: the run was trained on {then} and resumes on {now}: its bits may differ from here on"]


def changed_kernel(folder: Path, config: RunConfig, optimizer: Optimizer) -> list[str]:
    """A note if the run was begun when Adam's fused kernel was not yet the default on a CPU."""
    is_new = config.optim.fused is None and bool(optimizer_class.fused_on_cpu(optimizer))
    if not is_new or "fuses_adam" in run_folder.recorded(folder):
        return []
    what = "this run was begun without the fused kernel that is now the default of Adam on a CPU: its bits may differ"
    return [f"note: {what} from here on. optim.fused=false keeps them"]


def changed_source(folder: Path, task: Task, config: RunConfig) -> list[str]:
    """A warning if the task's code has changed since the run was trained."""
    kept = source_code.read(folder / "source")
    found = source_code.of_task(task, config.task.get("kind"), kept)
    change = source_code.difference(kept, found) if kept and found else None
    return [f"warning: the task's code has changed since the run was trained: {change}"] if change else []
