"""The commands that repeat a run and that verify it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.drawing.markup import Markup, element
from lockstep_lab.report import page
from lockstep_lab.report.run import RunSummary

_WITH_VALUE = ("--nproc", "--preset", "--run-dir", "--allow-change", "--max-restarts", "--checkpoint")
_OF_VERIFY = ("--nproc", "--preset", "--run-dir", "--cold")


def parts(run: RunSummary) -> list[Markup]:
    """The section on how to repeat the run."""
    given = _given(run)
    if not given and not has_task(run):
        said = "environment.json has no command that starts this run, and config.yaml no task: run the notebook or "
        return [element("p", said + "script that trained it again.")]
    if not given:
        said = "environment.json does not contain the command that started the run. To train its config again:"
        again = ["lockstep", "train", str(run.folder / "config.yaml"), "--run-dir", f"{run.folder}-again"]
        return [element("p", said), page.command(again)]
    git = run.environment.get("git")
    commit = str(git.get("commit") or "") if isinstance(git, Mapping) else ""
    lines = [["git", "checkout", commit]] if commit else []
    effect = "deletes this run first (--fresh)" if "--fresh" in given else "resumes this run"
    content = [element("p", f"The command of the last start; it {effect}:"), page.command(given)]
    if _is_lockstep(given):
        again = [*_without(given, ("--fresh", "--run-dir", "--allow-change")), "--run-dir", f"{run.folder}-again"]
        content += [element("p", "To train again, next to it:"), page.command(*lines, again)]
    notes = []
    if isinstance(git, Mapping) and git.get("dirty"):
        notes.append("Files had changed since that commit; the folder source has the task's code of the run.")
    if "--allow-change" in given:
        notes.append(
            "Keys of the config changed during the run (--allow-change): a single command does not repeat that."
        )
    world = run.environment.get("world")
    if isinstance(world, int) and world > 1 and not _is_lockstep(given):
        notes.append(f"It ran on {world} ranks.")
    return [*content, *(element("p", note, class_="soft") for note in notes)]


def has_task(run: RunSummary) -> bool:
    """True if the config names the task, so that a command can create it. A script or a notebook may pass its own."""
    task = run.config.get("task")
    return isinstance(task, Mapping) and "kind" in task


def to_verify(run: RunSummary) -> list[str]:
    """The command that verifies the training of a run. FILE.py:Task means a task that only the user has."""
    given = _given(run)
    if not has_task(run):
        return ["lockstep", "verify", "FILE.py:Task", "--run-dir", str(run.folder)]
    if not _is_lockstep(given):
        return ["lockstep", "verify", str(run.folder / "config.yaml"), "--run-dir", str(run.folder)]
    unknown = [part for part in given if part.startswith("--") and part.partition("=")[0] not in _OF_VERIFY]
    kept = _without(given, tuple(part.partition("=")[0] for part in unknown))
    if not any(part.partition("=")[0] == "--run-dir" for part in kept):
        kept += ["--run-dir", str(run.folder)]
    kept[1] = "verify"
    return kept


def _given(run: RunSummary) -> list[str]:
    """The command of the last start, with the number of ranks, which a launcher hides from its ranks."""
    command = run.environment.get("command")
    if not isinstance(command, Sequence) or isinstance(command, str) or not command:
        return []
    first, *rest = map(str, command)
    if first.endswith("ipykernel_launcher.py"):  # a notebook: nobody can type its command
        return []
    name = first.rpartition("/")[2]
    given = [name if name == "lockstep" else first, *rest]
    if first.endswith("lockstep/__main__.py"):
        given[0] = "lockstep"
    elif first.endswith(".py"):
        given.insert(0, "python")
    world = run.environment.get("world")
    if _is_lockstep(given) and isinstance(world, int) and world > 1:
        given = [*_without(given, ("--nproc",)), "--nproc", str(world)]
    return given


def _is_lockstep(command: Sequence[str]) -> bool:
    return list(command[:2]) == ["lockstep", "train"]


def _without(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command without some options and their values."""
    kept: list[str] = []
    skips = False
    for part in command:
        name, equals, _ = part.partition("=")
        if skips:
            skips = False
        elif name in options and part.startswith("--"):
            skips = name in _WITH_VALUE and not equals
        else:
            kept.append(part)
    return kept
