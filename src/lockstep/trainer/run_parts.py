"""From `train.parts` of the config to Parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.core import plugins
from lockstep.core.errors import UsageError
from lockstep.core.part import Part

GROUP = "lockstep.parts"  # of entry points


def make(entries: Sequence[str | Mapping[str, Any]]) -> list[Part]:
    """The Parts that a config names, in their order.

    Args:
        entries: each an entry point of the group `lockstep.parts` or FILE.py:Class; or a mapping with such a `kind`
            and the arguments of the class.

    Raises:
        UsageError: there is no such Part, or its class does not take these arguments.
    """
    parts = []
    for entry in entries:
        arguments = {} if isinstance(entry, str) else dict(entry)
        name = entry if isinstance(entry, str) else str(arguments.pop("kind"))
        kind = plugins.named_class(name, Part, group=GROUP, key="train.parts")
        try:
            parts.append(kind(**arguments))
        except Exception as error:
            raise UsageError(
                f"{kind.__name__} cannot be made: {type(error).__name__}: {error}",
                where=f"train.parts: {name}",
                remedy="give the arguments of its constructor next to `kind`: {kind: FILE.py:Class, ARGUMENT: VALUE}",
            ) from error
    return parts
