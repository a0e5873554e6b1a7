"""The base class of writers, what a writer knows about the run, and the guards that catch errors."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.core import atomic

FOLDER = "trackers"
"""In the run directory: the ids of the run in trackers, what their libraries print, and their files."""


@dataclass(frozen=True)
class RunInfo:
    """What a writer knows about the run."""

    name: str
    """`name` of the config."""
    folder: Path
    """The run directory. It exists."""
    first_step: int
    """Steps that were done before this start: 0 for a new run, the step of the checkpoint for a resumed run."""
    last_step: int
    """Step at which the training ends."""
    world_size: int
    """Number of ranks."""
    device: str
    """Type of the devices: `cpu` or `cuda`."""
    config: Mapping[str, Any]
    """The whole config as nested mappings, with the keys of config.yaml."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """The keys of the config that determine the training, by dotted path."""
    git: Mapping[str, Any] | None = None
    """`commit`, and `dirty`: whether tracked files differ from it. None outside of a git repository."""

    def flat_config(self) -> dict[str, Any]:
        """The whole config by dotted path, such as `optim.lr`. Lists stay lists."""
        return _flat(self.config)

    def about(self) -> dict[str, str]:
        """What trackers keep as tags: the run directory, and the git commit if there is one."""
        about = {"run_dir": str(self.folder.resolve())}
        if self.git is not None:
            about["git_commit"] = str(self.git["commit"]) + ("-dirty" if self.git["dirty"] else "")
        return about

    def tags(self) -> list[str]:
        """`log.tags` of the config."""
        return list(self.config.get("log", {}).get("tags", ()))

    def kept_id(self, tracker: str, make: Callable[[], str] = lambda: secrets.token_hex(8)) -> tuple[str, bool]:
        """The id of this run in a tracker, and whether an earlier start made it. The run directory keeps the id.

        Args:
            make: makes the id of a new run.
        """
        path = self.folder / FOLDER / f"{tracker}.json"
        if path.exists():
            return str(json.loads(path.read_text())["id"]), True
        path.parent.mkdir(exist_ok=True)
        new = make()
        atomic.write_text(path, json.dumps({"id": new}))
        return new, False


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


class Writer:
    """Receives the log of a run, on rank 0. Override the methods that you need: those of this class do nothing.

    A writer never changes the training. If one of its methods (also its constructor) raises, the user sees one warning,
    and the training goes on. A constructor that raised is called again with the next record.
    """

    name: str = ""
    """What warnings call the writer, such as `metrics.jsonl`. Empty: the name of the class."""
    files: tuple[str, ...] = ()
    """Files and folders in the run directory that the writer makes. `--fresh` deletes them."""
    note: str = ""
    """A message that came up, such as on a damaged file. The other writers show it."""
    library: str = ""
    """A library that must be installed. Its name is that of the extra of this package, too."""
    in_own_process: bool = False
    """Whether the writer runs in a process of its own, as a writer should whose library is slow to import, waits for a
    network, or draws random numbers. `progress` and `graph` are then not called."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run

    def record(self, entry: Mapping[str, float]) -> None:
        """Take an entry of the log: `step`, `epoch`, `time_s` and metrics by name, such as `train/loss`."""

    def progress(self, step: int) -> None:
        """Learn that `step` is done. Called a few times a second."""

    def message(self, text: str) -> None:
        """Take one or more lines for people, such as a warning."""

    def details(self, text: str) -> None:
        """Take lines for people who want to know more, such as the table of an evaluation. By default, a message."""
        self.message(text)

    def end(self, text: str) -> None:
        """Take the last lines of a training that reached its end. By default, a message."""
        self.message(text)

    def text(self, name: str, text: str, step: int) -> None:
        """Take a text, such as the report of an evaluation, after `step` steps. `name` is such as `eval/report`."""

    def picture(self, name: str, picture: Any, step: int) -> None:
        """Take a picture: an array of uint8 (height, width, 3), after `step` steps.

        `name` is a name as those of metrics are, such as `samples/evaluation`. The same name comes again with the
        pictures of later steps.
        """

    def graph(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take the model, in evaluation mode, with the arguments of an example call. Called once, in a new run."""

    def artifacts(self, paths: Sequence[Path]) -> None:
        """Take files and folders of the run directory, after the last step, where `log.artifacts` is set."""

    def close(self) -> None:
        """Release files and connections. Called once, at the end of the training, also when it failed."""


def reason_of(error: Exception) -> str:
    """An error as the reason in a warning."""
    return (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"


class Guard:
    """Turns the first error of some calls into one warning. Further errors are dropped.

    Args:
        name: what the warning says cannot be written.
        tell: shows the warning to the writers. The warning also goes to stderr.
    """

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self.name, self.tell = name, tell
        self.has_failed = False

    def attempt(self, call: Callable[[], object]) -> None:
        """Call `call`."""
        try:
            call()
        except Exception as error:
            if self.has_failed:
                return
            self.has_failed = True
            text = self.warning(reason_of(error))
            with contextlib.suppress(Exception):
                print(text, file=sys.stderr, flush=True)
            self.tell(text)

    def warning(self, reason: str) -> str:
        """The text of the warning."""
        return f"warning: {self.name} cannot be written: {reason}; training goes on"


class WriteGuard(Guard, Writer):
    """Passes every call on to one writer, and turns its first error into one warning. Further errors are dropped.

    Args:
        name: what the warning calls the writer.
        make: makes the writer. While it raises, it is called again with every record, message and progress.
        tell: shows the warning, and the writer's `note`, to the other writers. The warning also goes to stderr.
        entry: the entry of `log.writers` that names the writer, and the class, for the warning that the writer cannot
            be made. Empty if no entry names the writer.
    """

    def __init__(self, name: str, make: Callable[[], Writer], tell: Callable[[str], None], *, entry: str = "") -> None:
        super().__init__(name, tell)
        self.make, self.entry = make, entry
        self.writer: Writer | None = None

    def attempt(self, call: Callable[[], object]) -> None:
        """Call `call`, and show a note that came up."""
        super().attempt(call)
        if self.writer is not None and self.writer.note:
            note, self.writer.note = self.writer.note, ""
            self.tell(note)

    def warning(self, reason: str) -> str:
        """The text of the warning. A writer that cannot be made is named by its entry."""
        if not self.entry or self.writer:
            return super().warning(reason)
        remedy = f"remove the cause, or leave {self.entry} out of log.writers"
        return f"warning: {self.name} cannot be opened: {reason}; training goes on\n  remedy: {remedy}"

    def record(self, entry: Mapping[str, float]) -> None:
        self.attempt(lambda: self._opened().record(entry))

    def progress(self, step: int) -> None:
        self.attempt(lambda: self._opened().progress(step))

    def message(self, text: str) -> None:
        self.attempt(lambda: self._opened().message(text))

    def details(self, text: str) -> None:
        self.attempt(lambda: self._opened().details(text))

    def end(self, text: str) -> None:
        self.attempt(lambda: self._opened().end(text))

    def text(self, name: str, text: str, step: int) -> None:
        self.attempt(lambda: self._opened().text(name, text, step))

    def artifacts(self, paths: Sequence[Path]) -> None:
        self.attempt(lambda: self._opened().artifacts(paths))

    def picture(self, name: str, picture: Any, step: int) -> None:
        self.attempt(lambda: self._opened().picture(name, picture, step))

    def graph(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Some models cannot be traced. That says nothing of what else the writer writes.
        apart = Guard(f"the graph of the model in {self.name}", self.tell)
        apart.attempt(lambda: self._opened().graph(model, args, kwargs))

    def open(self) -> None:
        """Make the writer now, not with the first record."""
        self.attempt(self._opened)

    def close(self) -> None:
        if self.writer is not None:
            self.attempt(self.writer.close)
        self.has_failed = True  # a message that comes now, on another writer, needs no warning of this one

    def _opened(self) -> Writer:
        if self.writer is None:
            self.writer = self.make()
        return self.writer


def guard_writers(
    makers: Mapping[str, Callable[[], Writer]], entries: Mapping[str, str] = MappingProxyType({})
) -> list[WriteGuard]:
    """Open writers, each behind a guard. When one of them fails, the others show the warning.

    Args:
        makers: what makes each writer, by the name for warnings.
        entries: the entry of `log.writers` and the class of each writer, by the same names.
    """
    guards: list[WriteGuard] = []

    def tell_others(failed: str) -> Callable[[str], None]:
        def tell(text: str) -> None:
            for guard in guards:
                if guard.name != failed:
                    guard.message(text)

        return tell

    for name, make in makers.items():
        guards.append(WriteGuard(name, make, tell_others(name), entry=entries.get(name, "")))
    for guard in guards:
        guard.open()
    return guards
