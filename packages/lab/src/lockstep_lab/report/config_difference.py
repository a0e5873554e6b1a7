"""Configs as dotted keys, and the keys that differ between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys. Lists stay whole."""
    if not isinstance(values, Mapping) or (prefix and not values):
        return {prefix.removesuffix("."): values} if prefix else {}
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= flat(value, f"{prefix}{key}.")
    return flattened


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of each key that differs between configs, in the order of the configs; None if a config lacks it."""
    flattened = [flat(config) for config in configs]
    keys = dict.fromkeys(key for config in flattened for key in config)
    values = {key: [config.get(key) for config in flattened] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found[1:])}
