"""What all ways to reach machines share: the training, its nodes, and checks before anything is submitted."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.core.errors import UsageError, number_of
from lockstep.core.user_files import check_replaceable

_SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)|APIKEY", re.IGNORECASE)
_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # folders that nodes do not share
HIDDEN = "HIDDEN"
"""Replaces a secret value if a text is shown."""


@dataclass(frozen=True)
class Job:
    """A training on several nodes."""

    target: str
    """RECIPE, FILE.yaml or FILE.py:Task."""
    name: str
    """Name of the config."""
    nodes: int
    nproc: str
    """Ranks of a node; `auto`: one rank per GPU."""
    run_dir: str
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Further options of `lockstep train`, such as `--preset h100x8`."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def train(self) -> list[str]:
        """The arguments of `lockstep` on each node, except where the nodes meet."""
        return ["train", self.target, *self.overrides, "--nproc", self.nproc, "--run-dir", self.run_dir, *self.options]

    @property
    def shown(self) -> Job:
        """This job for a terminal or a log: without the values of secret variables."""
        hidden = {name: HIDDEN if is_secret(name) else value for name, value in self.environment.items()}
        return replace(self, environment=hidden)

    @property
    def secrets(self) -> list[str]:
        """The names of variables that probably hold a secret."""
        return [name for name in self.environment if is_secret(name)]

    @property
    def about(self) -> str:
        """A line for people: what is trained, and on how many ranks."""
        ranks = "one rank per GPU" if self.nproc == "auto" else f"{self.nproc} rank{'s' * (self.nproc != '1')}"
        if self.nodes == 1:
            return f"{self.target}: one node, {ranks}"
        return f"{self.target}: {number_of(self.nodes, 'node')}, {ranks} on each"


def is_secret(name: str) -> bool:
    """True if an environment variable of this name probably holds a secret, such as WANDB_API_KEY."""
    return bool(_SECRET.search(name))


def shown_command(arguments: Sequence[str]) -> str:
    """The command line `lockstep ARGUMENTS` for a shell, without the values of secret variables."""
    shown, before = ["lockstep"], ""
    for argument in arguments:
        option, name = ("--env=", argument[6:]) if argument.startswith("--env=") else ("", argument)
        name, equals, _ = name.partition("=")
        hides = equals and is_secret(name) and (option or before == "--env")
        shown.append(f"{option}{name}={HIDDEN}" if hides else argument)
        before = argument
    return shlex.join(shown)


def read_environment(given: Iterable[str]) -> dict[str, str]:
    """The variables of `--env NAME=VALUE`. `NAME` without a value takes its value from this environment.

    Raises:
        UsageError: not a variable's name, or a name that is not set here.
    """
    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"{name!r} is not the name of a variable", where="--env", remedy="write --env NAME=VALUE")
        if not equals and name not in os.environ:
            remedy = f"export it, or write --env {name}=VALUE"
            raise UsageError(f"{name} is not set here", where="--env", remedy=remedy)
        variables[name] = value if equals else os.environ[name]
        if "\n" in variables[name] or "\0" in variables[name]:
            raise UsageError(f"the value of {name} has several lines", where="--env", remedy="read it from a file")
    return variables


def check_target(target: str) -> None:
    """Check that the file of `FILE.py:Task` defines a class `Task`, without executing the file.

    Raises:
        UsageError: the file cannot be parsed, or does not define the name.
    """
    path, is_file, name = target.rpartition(".py:")
    if not is_file:
        return
    path += ".py"
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"is not Python: {error}", where=path, remedy="check it with: python FILE.py") from error
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=path, remedy="check its path") from error
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    if name.partition(".")[0] not in bound and "*" not in bound:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        there = f"There are: {', '.join(classes)}" if classes else "It contains no class"
        raise UsageError(f"there is no {name!r}", where=path, remedy=f"name a class in the file. {there}")


def check_tool(name: str, remedy: str) -> str:
    """The path of a command.

    Raises:
        UsageError: the command is missing.
    """
    path = shutil.which(name)
    if path is None:
        raise UsageError(f"the command {name!r} is missing on this machine", remedy=remedy)
    return path


def warnings(job: Job, global_batch: int | None, directory: str) -> list[str]:
    """Warnings about a job: what is probably wrong, but not an error.

    Args:
        global_batch: samples of an update, if the config contains a number.
        directory: the working directory of the training.
    """
    found = []
    place = os.path.normpath(os.path.join(directory, job.run_dir))
    if job.nodes > 1 and any(f"{place}/".startswith(f"{folder}/") for folder in _OF_ONE_NODE):
        what = f"the run directory {place} is probably local to each node, but nodes must share it"
        found.append(f"{what}; give a --run-dir on a shared file system")
    if job.nproc != "auto" and global_batch is not None and job.nodes * int(job.nproc) > global_batch:
        ranks = job.nodes * int(job.nproc)
        what = f"{ranks} ranks share a global batch of {global_batch}, so {ranks - global_batch} have nothing to do"
        found.append(f"{what}; raise batch.global, or use fewer ranks")
    return found


def write(path: Path, text: str, *, mark: str, is_secret: bool, force: bool = False) -> None:
    """Write a file. It may replace a file with the same mark.

    Args:
        mark: a part of all texts that this command writes.
        is_secret: only the user may read it.
        force: also replace any other file.

    Raises:
        UsageError: the path is another file, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_replaceable(path, force=force, mark=mark)
        path.touch(mode=0o600 if is_secret else 0o666)
        if is_secret:
            path.chmod(0o600)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise UsageError(what, where=str(path), remedy="give a different path with --output") from error
