"""The names of a model's parameters, and the patterns that match them. It imports torch late: the config imports it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def names_of_parameters(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by its first name. A tied parameter has a name in each module that holds it."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in found.values()}


def matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    """True if one of the patterns, with `*` and `?`, matches one of the names of a parameter."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
