"""Who asked, a command or a script: messages name options and keys, or arguments of `Trainer` or `Loop` instead."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lockstep.core.errors import LockstepError

_is_command = False
_WORDS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"--run-dir (?!to\b|for\b)([\w./~-]*[\w/])", lambda match: f"Trainer(run_dir={_quoted(match[1])})"),
    (r"--run-dir", "Trainer(run_dir=...)"),
    (r"--fresh", "Trainer(fresh=True)"),
    (r"--allow-change (?!to\b)([\w.]*\w)", lambda match: f"Trainer(allow_change=[{_quoted(match[1])}])"),
    (r"--allow-change", "Trainer(allow_change=...)"),
    (r"--force", "force=True"),
    (r"lockstep export --optimizer", "Trainer.export_training_state(file)"),
)
"""Options of the command line, and what they are in Python."""
_OF_TRAINER: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"--checkpoint", "Trainer(checkpoint=...)"),
    (r"--max-restarts", "fit(max_restarts=...)"),
    (r"--nproc (\d+|auto)", lambda match: f"fit(nproc={match[1]})"),
    (r"--nproc", "fit(nproc=...)"),
)
"""Options that `Loop` does not have."""
_KEY = re.compile(
    r"""(?<![\w."'/=-])((?:[a-zA-Z]\w*\.)+\w+|device)(=(?:\[[^\]]*\]|[^\s,;:)]*[^\s,;:).]))?(?!\w|[./]\w)"""
)
"""A key of the config, and its value if there is one."""
LOOP_ARGUMENTS = {
    "batch.global": "global_batch",
    "batch.micro": "micro_batch",
    "train.epochs": "epochs",
    "train.steps": "steps",
    "optim.clip_norm": "clip_norm",
    "precision": "precision",
    "parallel.strategy": "strategy",
    "data.workers": "workers",
    "seed": "seed",
}
"""Keys of the config that are arguments of `Loop`."""
_OF_LOOP = {
    "data.train": "train_data",
    "Task.train_data": "train_data",
    "Task.model": "the model",
    "Task.optimizer": "the optimizer",
    "Task.loss": "the body of the loop",
    "Task.weight": "Loop(units=...)",
    "Task.collate": "Loop(collate=...)",
    "optim.name": "the optimizer",
}
"""What a user of `Loop` knows under a different name."""
_EVALUATE = "call loop.evaluate in the body"
NOT_IN_A_LOOP = {
    "watch.every": "the watch computes the loss again: write a Task for it",
    "parallel.tensor": "write a Task to split layers over ranks",
    "schedule": "give a scheduler of torch: Loop(scheduler=...)",
    "data.eval": _EVALUATE,
    "train.eval_every": _EVALUATE,
    "train.stop_when": f"{_EVALUATE}, and leave the loop with break",
    "checkpoint.keep_best": "use loop.save(path, if_best=value)",
    "optim": "make the optimizer as you want it, and give it to the Loop",
}
"""Beginnings of keys that a `Loop` cannot use, and what to do instead."""


def _quoted(word: str) -> str:
    return "..." if word in ("DIR", "KEY") else f'"{word}"'


def command() -> AbstractContextManager[None]:
    """Inside, a command asks, and errors stay as they are."""
    return _asking(is_command=True)


def script() -> AbstractContextManager[None]:
    """Inside, a script asks that a command runs."""
    return _asking(is_command=False)


@contextlib.contextmanager
def _asking(*, is_command: bool) -> Iterator[None]:
    global _is_command
    before, _is_command = _is_command, is_command
    try:
        yield
    finally:
        _is_command = before


def words(text: str, asker: str = "Trainer") -> str:
    """`text` with the arguments of `Trainer` or `Loop` instead of options and keys, unless a command asks.

    Args:
        asker: the class whose arguments are named.
    """
    if _is_command:
        return text
    if "--" in text:
        if asker == "Loop":  # it has no method that starts ranks
            text = re.sub(r"(?<!lockstep run )(?<![\w-])(--nproc|--max-restarts)\b", r"lockstep run \1", text)
        for option, argument in (*_WORDS, *(() if asker == "Loop" else _OF_TRAINER)):
            text = re.sub(rf"(?<![\w-]){option}(?![\w-])", argument, text)
        text = text.replace("Trainer(", f"{asker}(")
    if asker == "Loop":
        text = _KEY.sub(_of_loop, text)
    return text


def _of_loop(match: re.Match[str]) -> str:
    """A key of the config, with its value if there is one, as a user of `Loop` writes it."""
    key, value = match[1], match[2] or ""
    section, _, name = key.rpartition(".")
    if key in LOOP_ARGUMENTS:
        return f"{LOOP_ARGUMENTS[key]}{value}"
    if key in _OF_LOOP:
        return f"{_OF_LOOP[key]}{value}"
    if key not in _keys():
        return match[0]
    if section.partition(".")[0] in ("optim", "schedule"):
        return f"{name}{value} of the {'optimizer' if section.startswith('optim') else 'scheduler'}"
    return f"Loop(config={written({key: literal(value[1:])})})" if value else key


@functools.cache
def _keys() -> frozenset[str]:
    from lockstep.core.config.sections import all_keys

    return frozenset(path for path, _ in all_keys())


def literal(text: str) -> Any:
    """A value of the command line in Python."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def written(value: Any) -> str:
    """A value as a script has it, with double quotes."""
    text = repr(value)
    return text if '"' in text else text.replace("'", '"')


def keys_of(names: Iterable[str]) -> tuple[str, ...]:
    """The keys of the config for names that may be arguments of `Loop`."""
    keys = {argument: key for key, argument in LOOP_ARGUMENTS.items()}
    return tuple(keys.get(name, name) for name in names)


def translate(error: LockstepError, asker: str) -> None:
    """Let an error name arguments instead of options; see `words`."""
    error.what = words(error.what, asker)
    error.where = error.where and words(error.where, asker)
    error.remedy = error.remedy and words(error.remedy, asker)


def script_name() -> str | None:
    """The name of the script that asks, without its suffix, as a folder may have it. None: a command or a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if _is_command or not file:
        return None
    path = Path(file).absolute()
    stem = path.parent.name if path.stem == "__main__" else path.stem  # python -m PACKAGE
    return re.sub(r"[^\w.-]+", "_", stem).strip(".")[:100] or None
