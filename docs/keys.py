"""Fills the page docs/keys.md when the site is built (`hooks` of mkdocs.yml): every key of a config."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lockstep.cli.config_text import meanings_of
from lockstep.configs import registry
from lockstep.core.config.sections import RunConfig

MARK = "<!-- all keys -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page."""
    return markdown.replace(MARK, text()) if MARK in markdown else markdown


def text() -> str:
    """All keys in Markdown: those of every config by section, then the options of each kind of task."""
    parts = []
    plain = {name: field for name, field in RunConfig.model_fields.items() if not section_of(field) and name != "task"}
    parts.append(_table("Top level", [(name, RunConfig, name, field) for name, field in plain.items()]))
    for name, field in RunConfig.model_fields.items():
        section = section_of(field)
        if section is not None:
            parts.append(_table(name, list(rows(section, name))))
    for kind in registry.kinds():
        options = registry.options_class(kind)
        assert options is not None
        parts.append(_table(f"task, with kind: {kind}", list(rows(options, "task"))))
    return "\n\n".join(parts)


def rows(section: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel], str, FieldInfo]]:
    """The dotted path, the section, the name and the field of each key, also of the sections inside."""
    for name, field in section.model_fields.items():
        key = f"{path}.{field.alias or name}"
        yield key, section, name, field
        inner = section_of(field)
        if inner is not None:
            yield from rows(inner, key)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key holds. None: it holds a value, or a list of sections."""
    kinds = [field.annotation, *get_args(field.annotation)]
    found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return found[0] if found and get_origin(field.annotation) not in (list, dict) else None


def _table(title: str, keys: list[tuple[str, type[BaseModel], str, FieldInfo]]) -> str:
    lines = [f"## {title}", "", "| key | values | default | meaning |", "|---|---|---|---|"]
    for key, section, name, field in keys:
        inner = section_of(field)
        about = (inspect.getdoc(inner) or "").split("\n\n")[0] if inner is not None else ""
        meaning = " ".join((meanings_of(section).get(name) or about).split())
        cells = (f"`{key}`", values_of(field.annotation), _default(field), meaning)
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines)


def values_of(kind: Any) -> str:
    """The values that a type allows, in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return values_of(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(values_of(one) for one in arguments))
    if origin is list or origin is tuple:
        return f"list of {values_of(arguments[0])}" if arguments else "list"
    if origin is dict:
        return "mapping"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "section"
    names = {int: "integer", float: "number", str: "text", bool: "`true`, `false`", type(None): "`null`", Any: "any"}
    return names.get(kind, re.sub(r"^typing\.", "", getattr(kind, "__name__", str(kind))))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, list | tuple) and any(isinstance(one, BaseModel) for one in value):
        return "list"
    return f"`{json.dumps(value, default=str)}`"
