"""The base class of writers, and the facts about a run that a writer knows."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core import atomic
from lockstep.core.errors import number_of

FOLDER = "trackers"
"""In the run directory: the ids of the run in trackers, what their libraries print, and their files."""


@dataclass(frozen=True)
class RunInfo:
    """The facts about a run that a writer knows."""

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

    @property
    def ranks(self) -> str:
        """The ranks in words: "2 ranks", or "8 virtual ranks on 2 ranks"."""
        virtual = self.config.get("parallel", {}).get("virtual_ranks")
        ranks = number_of(self.world_size, "rank")
        return ranks if virtual is None else f"{number_of(virtual, 'virtual rank')} on {ranks}"

    def flat_config(self) -> dict[str, Any]:
        """The whole config by dotted path, such as `optim.lr`. Lists stay lists."""
        return _flat(self.config)

    def about(self) -> dict[str, str]:
        """The tags that trackers keep: the run directory, and the git commit if there is one."""
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
    and the training continues. A constructor that raised is called again with the next record.
    """

    name: str = ""
    """The name of the writer in warnings, such as `metrics.jsonl`. Empty: the name of the class."""
    files: tuple[str, ...] = ()
    """Files and folders in the run directory that the writer makes. `--fresh` deletes them."""
    note: str = ""
    """A message that came up, such as on a damaged file. The other writers show it."""
    library: str = ""
    """A library that must be installed. Its name is that of the extra of this package, too."""
    in_own_process: bool = False
    """True if the writer runs in its own process. It should if its library is slow to import, waits for a network, or
    draws random numbers. `progress` and `graph` are then not called."""

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
        """Take an image: an array of uint8 (height, width, 3), after `step` steps.

        `name` has the form of the names of metrics, such as `samples/evaluation`. The same name comes again with the
        images of later steps.
        """

    def graph(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take the model, in evaluation mode, with the arguments of an example call. Called once, in a new run."""

    def artifacts(self, paths: Sequence[Path]) -> None:
        """Take files and folders of the run directory after the last step, if `log.artifacts` is set."""

    def close(self) -> None:
        """Release files and connections. Called once, at the end of the training, also when it failed."""


def tell(writers: Sequence[Writer], text: str) -> None:
    """Give all writers one or more lines for people."""
    for writer in writers:
        writer.message(text)
