"""Read YAML files that name classes: names stay as they are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

_INTEGER = re.compile(r"(0|-?[1-9][0-9]*)$")
_SETTINGS = ("path", "train", "val", "valid", "test", "download", "colors", "ignore", "ignore_index", "masks")
"""Keys whose value may be null."""


class _NamesLoader(yaml.SafeLoader):
    """Reads `no`, `on`, `null`, `007`, `1e3`, `1.0` and dates as text. Only integers as Python writes them are
    numbers, and only an empty value or `~` is null."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        "~": [("tag:yaml.org,2002:null", re.compile("~$"))],
        "": [("tag:yaml.org,2002:null", re.compile("$"))],
        "<": [("tag:yaml.org,2002:merge", re.compile("<<$"))],
        **{letter: [("tag:yaml.org,2002:int", _INTEGER)] for letter in "-0123456789"},
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1 and key != "<<"), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice!r} occurs more than once", node.start_mark
            )
        return super().construct_mapping(node, deep)


def load_names(text: str) -> Any:
    """The content of a YAML text, in which class names stay as they are written.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    content = yaml.load(text, _NamesLoader)
    if not isinstance(content, Mapping):
        return content
    nulls = [key for key in _SETTINGS if content.get(key) in ("null", "Null", "NULL")]
    return {**content, **dict.fromkeys(nulls)}
