"""Who asked, a command or a script: errors name options of the command line, or arguments of `Trainer` instead."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from lockstep.core.errors import LockstepError

T = TypeVar("T")
_is_command = False
_WORDS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"--run-dir (?!to\b|for\b)([\w./~-]*[\w/])", lambda match: f"Trainer(run_dir={_quoted(match[1])})"),
    (r"--run-dir", "Trainer(run_dir=...)"),
    (r"--fresh", "Trainer(fresh=True)"),
    (r"--allow-change (?!to\b)([\w.]*\w)", lambda match: f"Trainer(allow_change=[{_quoted(match[1])}])"),
    (r"--allow-change", "Trainer(allow_change=...)"),
    (r"--checkpoint", "Trainer(checkpoint=...)"),
    (r"--max-restarts", "fit(max_restarts=...)"),
    (r"--nproc (\d+|auto)", lambda match: f"fit(nproc={match[1]})"),
    (r"--nproc", "fit(nproc=...)"),
    (r"--force", "force=True"),
    (r"lockstep export --optimizer", "Trainer.export_training_state(file)"),
)
"""Options of the command line, and what they are in Python."""


def _quoted(word: str) -> str:
    return "..." if word in ("DIR", "KEY") else f'"{word}"'


@contextlib.contextmanager
def command() -> Iterator[None]:
    """Inside, a command asks, and errors stay as they are."""
    global _is_command
    before, _is_command = _is_command, True
    try:
        yield
    finally:
        _is_command = before


@contextlib.contextmanager
def script() -> Iterator[None]:
    """Inside, a script asks that a command runs."""
    global _is_command
    before, _is_command = _is_command, False
    try:
        yield
    finally:
        _is_command = before


def words(text: str, asker: str = "Trainer") -> str:
    """`text` with the arguments of `Trainer` instead of options, unless a command asks.

    Args:
        asker: the class whose arguments are named.
    """
    if _is_command or "--" not in text:
        return text
    for option, argument in _WORDS:
        text = re.sub(rf"(?<![\w-]){option}(?![\w-])", argument, text)
    return text.replace("Trainer(", f"{asker}(")


def speaks_python(cls: type[T]) -> type[T]:
    """A class decorator: errors that leave a public method name arguments instead of options; see `words`."""
    members = {name: value for one in reversed(cls.__mro__[:-1]) for name, value in vars(one).items()}
    for name, value in members.items():
        if callable(value) and not isinstance(value, type) and (not name.startswith("_") or name == "__init__"):
            setattr(cls, name, _translating(value, cls.__name__))
    return cls


def _translating(method: Callable[..., Any], asker: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except LockstepError as error:
            error.what = words(error.what, asker)
            error.where = error.where and words(error.where, asker)
            error.remedy = error.remedy and words(error.remedy, asker)
            raise

    return call


def script_name() -> str | None:
    """The name of the script that asks, without its suffix, as a folder may have it. None: a command or a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if _is_command or not file:
        return None
    path = Path(file).absolute()
    stem = path.parent.name if path.stem == "__main__" else path.stem  # python -m PACKAGE
    return re.sub(r"[^\w.-]+", "_", stem).strip(".")[:100] or None
