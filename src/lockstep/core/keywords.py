"""Calls with arguments that a function does not have: the error names the argument that is meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from lockstep.core import caller
from lockstep.core.config import other_words
from lockstep.core.errors import LockstepError, UsageError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
T = TypeVar("T")
_OPTIONS = ("--run-dir", "--fresh", "--allow-change", "--nproc", "--max-restarts")
_TAKE_SETTINGS = ("Loop", "Trainer", "Trainer.fit")
"""Calls in which users write words of the config, or of other libraries."""


def checked(function: F, name: str) -> F:
    """`function`, but a call with wrong arguments is a UsageError.

    Args:
        name: of the function in the error.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **given: Any) -> Any:
        try:
            return function(*arguments, **given)
        except TypeError:
            signature = inspect.signature(function)
            try:
                signature.bind(*arguments, **given)
            except TypeError as error:
                raise _fault(signature, name, given, str(error)) from None
            raise

    return call  # type: ignore[return-value]


def of_class(cls: C) -> C:
    """A class decorator: wrong arguments of the constructor are a UsageError."""
    cls.__init__ = checked(cls.__init__, cls.__name__)  # type: ignore[misc]
    return cls


def speaks_python(cls: type[T]) -> type[T]:
    """A class decorator: errors that leave a public method name arguments instead of options; see `caller.words`.
    A call with wrong arguments is such an error."""
    for name, value in list(vars(cls).items()):
        if callable(value) and not isinstance(value, type) and (not name.startswith("_") or name == "__init__"):
            shown = cls.__name__ if name == "__init__" else f"{cls.__name__}.{name}"
            setattr(cls, name, _translating(checked(value, shown), cls.__name__))
    return cls


def _translating(method: Callable[..., Any], asker: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except LockstepError as error:
            caller.translate(error, asker)
            raise

    return call


def _fault(signature: inspect.Signature, name: str, given: dict[str, Any], what: str) -> UsageError:
    names = [one for one in signature.parameters if one != "self"]
    word = next((one for one in given if one not in names), None)
    if word is None:
        return UsageError(what, where=f"{name}(...)", remedy=f"its arguments are {', '.join(names)}")
    remedy = meant(word, given[word], name) if name in _TAKE_SETTINGS else ""
    return unknown(word, names, where=f"{name}({word}=...)", remedy=remedy)


def unknown(word: str, names: Iterable[str], *, where: str, remedy: str = "") -> UsageError:
    """The error for an unknown argument.

    Args:
        names: of the arguments that there are.
        remedy: empty: the nearest name, and all names.
    """
    near = did_you_mean(word, names)
    remedy = remedy or f"{near}{'Its' if near else 'its'} arguments are {', '.join(names)}"
    return UsageError(f"it has no argument {word!r}", where=where, remedy=remedy)


def meant(word: str, value: Any, name: str) -> str:
    """What to write for a word of the config or of other libraries. Empty: it is not known.

    Args:
        name: of the function that got it.
    """
    is_plain = isinstance(value, int | float | str)
    found = other_words.meant(word, str(value) if is_plain else None, options=_OPTIONS)
    asker = name.partition(".")[0]
    if "--rendezvous" in found:
        return "leave it out, torchrun starts the ranks of several nodes"
    if other_words.is_advice(found):
        return "" if found.startswith("give ") else caller.words(found, asker)
    if found.startswith("--"):
        option, _, rest = found.partition(" ")
        return f"write {caller.words(f'{option} {rest}' if rest and option != '--fresh' else option, asker)}"
    keys = {key: text for key, _, text in (one.partition("=") for one in found.split(" "))} if found else {}
    if "train.parts" in keys:
        return "write parts=[...], with objects of lockstep.Part"
    if asker == "Loop":
        refused = (advice for key in keys for start, advice in caller.NOT_IN_A_LOOP.items() if key.startswith(start))
        if advice := next(refused, ""):
            return advice
    values = {key: "..." if text == "VALUE" else caller.literal(text) for key, text in keys.items()}
    if not values:
        return ""
    if asker != "Loop":
        return f"put it into the config: {caller.written(_nested(values))}"
    own: dict[str, Any] = {
        caller.LOOP_ARGUMENTS[key]: value for key, value in values.items() if key in caller.LOOP_ARGUMENTS
    }
    others = {key: value for key, value in values.items() if key not in caller.LOOP_ARGUMENTS}
    if others:
        own["config"] = others
    return f"write {', '.join(f'{key}={caller.written(value)}' for key, value in own.items())}"


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return found
