"""A resolved config as YAML, with the meaning of each key, and where its value comes from."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel

from lockstep.cli import config_preset
from lockstep.configs import config_file, registry
from lockstep.configs.config_layers import read_target
from lockstep.core.config.config_section import Section
from lockstep.core.config.sections import RunConfig
from lockstep.trainer import foreign

_WIDTH = 118
_VALUES_UP_TO = 40  # columns from which comments on short values begin


def resolved(target: str, overrides: Sequence[str] = (), *, preset: str | None = None, explained: bool = True) -> str:
    """The config of a recipe, a file or a task, with every key, as `lockstep train` would use it.

    The text is YAML that `lockstep train` takes.

    Args:
        preset: how a kind of machine runs it, see `config_preset`.
        explained: whether a comment above each key says what it means.

    Raises:
        UsageError: the config has errors.
    """
    layers = read_target(target)
    loaded = config_file.load(target, overrides)
    config, written = foreign.settled_alone(loaded), loaded.model_dump(by_alias=True)
    of_code = config.model_dump(by_alias=True)
    given = [override.partition("=")[0] for override in overrides]
    machine = config_preset.read(preset) if preset else None
    if machine is not None:
        config = machine.apply(config, overrides)
    values = config.model_dump(by_alias=True)
    plain = config_file.without_suggestions(layers, overrides)

    def source(path: str, value: Any) -> str:
        if config_file.related(path, given):
            return "command line"
        if machine is not None and config_file.related(path, machine.keys_for(config)) and _at(of_code, path) != value:
            return f"preset {machine.name}"
        if _at(of_code, path) != _at(written, path):
            return f"code of {target}"
        file = config_file.related(path, layers.sources)
        if file:
            return layers.sources[file] if layers.sources[file] != target else _named(target)
        return "default" if path.startswith("task.") or _at(plain, path) == value else "suits the task"

    lines = [f"# {' '.join(['lockstep train', target, *overrides, *(['--preset', preset] if preset else [])])}"]
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        is_section = isinstance(section, type) and issubclass(section, Section)
        if not is_section and name != "task":
            lines += _key(
                name, values[name], meanings_of(RunConfig).get(name, ""), source(name, values[name]), explained
            )
            continue
        lines += ["", f"{name}:"] if values[name] else ["", f"{name}: {{}}"]
        meanings = meanings_of(section if is_section else registry.options_class(values["task"].get("kind", "")))  # type: ignore[arg-type]
        for key, value in values[name].items():
            path = f"{name}.{key}"
            lines += [
                f"  {line}"
                for line in _key(
                    key, value, meanings.get(key) or meanings.get(f"{key}_", ""), source(path, value), explained
                )
            ]
    return "\n".join(lines) + "\n"


def _named(target: str) -> str:
    return target if target.endswith((".yaml", ".yml", ".py")) else f"recipe {target}"


def _key(key: str, value: Any, meaning: str, source: str, explained: bool) -> Iterator[str]:
    """The lines of a key: its meaning as a comment, its value, and where the value comes from."""
    if explained and meaning:
        yield from textwrap.wrap(meaning, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    flow = _dump(value, default_flow_style=True).removesuffix("...\n").rstrip("\n")
    line = f"{key}: {flow}"
    if len(line) <= _WIDTH or not isinstance(value, Mapping | list):
        yield f"{line:<{_VALUES_UP_TO}}  # {source}"
        return
    yield f"{f'{key}:':<{_VALUES_UP_TO}}  # {source}"
    yield from textwrap.indent(_dump(value, default_flow_style=None), "  ").rstrip("\n").splitlines()


def _dump(value: Any, *, default_flow_style: bool | None) -> str:
    text: str = yaml.dump(
        value, Dumper=config_file.YamlDumper, default_flow_style=default_flow_style, sort_keys=False, width=2**30
    )
    return text


@functools.cache
def meanings_of(section: type[BaseModel] | None) -> dict[str, str]:
    """The text below each key in the source of a section, by key. It ends at an empty line."""
    found: dict[str, str] = {}
    for part in reversed(section.__mro__ if section is not None else ()):
        if not issubclass(part, BaseModel) or part is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0].body  # type: ignore[attr-defined]
        for statement, after in itertools.pairwise(body):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
                found[statement.target.id] = inspect.cleandoc(str(after.value.value)).split("\n\n")[0]
    return found


def _at(values: Mapping[str, Any], path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None  # type: ignore[assignment]
    return values
