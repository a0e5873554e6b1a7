"""Methods that a user may override: whether an object has the default or its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def default(method: F) -> F:
    """A decorator that marks a method of a base class, such as `Task`: `is_default` recognizes it.

    The mark is the function itself. A mark that is just True would not do: decorators copy attributes to the function
    that they return.
    """
    method.default = method  # type: ignore[attr-defined]
    return method


def is_default(method: Callable[..., Any]) -> bool:
    """True if a bound method is the default of the base class: neither a class nor the object overrides it."""
    function = getattr(method, "__func__", None)
    return function is not None and getattr(function, "default", None) is function
