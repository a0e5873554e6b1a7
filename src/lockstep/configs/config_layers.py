"""From a recipe's name or a YAML file to its values, together with the files that it extends."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lockstep.configs import own_file, registry
from lockstep.core.config.config_section import Section
from lockstep.core.config.sections import RunConfig
from lockstep.core.errors import UsageError, did_you_mean


def read_numbers_as_today(side: Any) -> None:
    """Let a loader or a dumper of YAML treat `1e-8` as YAML 1.2 does: as a number. (For YAML 1.1 it is text.)"""
    side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


class YamlLoader(yaml.SafeLoader):
    """Reads numbers as YAML 1.2 does: `1e-8` is a number. (For PyYAML, which follows YAML 1.1, it is text.)"""


_InC: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast; not every PyYAML has it


class _QuickLoader(_InC):  # type: ignore[misc]
    """The same values. Its errors lack the line that is wrong."""


read_numbers_as_today(YamlLoader)
read_numbers_as_today(_QuickLoader)


def parsed(text: str) -> Any:
    """The values of a YAML text.

    Raises:
        yaml.YAMLError: it is not YAML. Shows the line.
    """
    try:
        return yaml.load(text, _QuickLoader)
    except yaml.YAMLError:
        return yaml.load(text, YamlLoader)


class Layers(NamedTuple):
    """The values of a config file, and of the files that it extends."""

    values: dict[str, Any]
    name: str
    """The target, as it was given."""
    sources: dict[str, str]
    """The file of each key that a file sets, by its dotted path."""


def read_target(target: str) -> Layers:
    """The values of a recipe's name, a YAML file or `FILE.py:Task`, together with those of the files that it extends.

    Raises:
        UsageError: there is no such recipe or file, or files extend each other in a circle.
    """
    path, _, attribute = target.partition(":")
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise UsageError("no such file", where=path, remedy="give the path of your Python file, as FILE.py:Task")
        own_file.check_target(path, attribute)
        values = {"name": Path(path).stem, "task": {"kind": f"{os.path.abspath(path)}:{attribute}"}}
        return Layers(values, target, {})
    values, sources = _read_layers(target, ())
    values.setdefault("name", Path(target).stem)
    return Layers(values, target, sources)


def _read_layers(target: str, above: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a file over those of the file that it extends, and the file of each key.

    Args:
        above: the files that extend this file.
    """
    file, content = _content(target, where=above[-1] if above else "")
    if file in above:
        chain = " extends ".join((*above[above.index(file) :], file))
        raise UsageError(f"{chain}: a circle", where=f"{above[-1]}: extends", remedy="remove one of them")
    values = parse_yaml(content, target if not above else file)
    base = values.pop("extends", None)
    sources = dict.fromkeys(_paths(values), target if not above else file)
    if base is None:
        return values, sources
    if not isinstance(base, str):
        raise UsageError(f"{base!r} is not a file", where=f"{target}: extends", remedy="name a recipe or FILE.yaml")
    if base.endswith((".yaml", ".yml")):
        base = os.path.join(os.path.dirname(file), os.path.expanduser(base))
    base_values, base_sources = _read_layers(base, (*above, file))
    base_values.pop("name", None)
    return _over(base_values, values), base_sources | sources


def _over(base: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`base`, with `values` overriding its values. Keys that exclude a key of `values` are left out."""
    merged = dict(base)
    for section, key, other in alternatives():
        given = values.get(section)
        if isinstance(given, Mapping) and key in given and isinstance(merged.get(section), Mapping):
            merged[section] = {name: value for name, value in merged[section].items() if name != other}
    batch = values.get("batch")
    if isinstance(batch, Mapping) and isinstance(merged.get("batch"), Mapping):
        by_rank, by_update = {"per_rank", "accumulate"}, {"global", "micro"}
        excluded = (by_update if by_rank & batch.keys() else set()) | (by_rank if by_update & batch.keys() else set())
        merged["batch"] = {name: value for name, value in merged["batch"].items() if name not in excluded}
    for key, value in values.items():
        before: Any = merged.get(key)
        # Another kind of task has other options.
        is_section = isinstance(before, Mapping) and isinstance(value, Mapping)
        is_other = is_section and key == "task" and value.get("kind", before.get("kind")) != before.get("kind")
        merged[key] = {**before, **value} if is_section and not is_other else value
    return merged


def _paths(values: Mapping[str, Any]) -> Iterator[str]:
    """The dotted paths of keys in the sections of a file."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in value)
        else:
            yield str(key)


def _content(target: str, where: str) -> tuple[str, bytes | str]:
    """The file that a recipe's name or a path means, and its content. `where` names the file that extends it."""
    if target.endswith((".yaml", ".yml")):
        if not Path(target).is_file():
            remedy = "`lockstep recipes` lists the recipes that need no file"
            raise UsageError("no such file", where=f"{where}: extends {target}" if where else target, remedy=remedy)
        return os.path.abspath(target), _read_bytes(Path(target))
    recipe = registry.own_recipe(target)
    if recipe is None:
        known = registry.recipes()
        if target not in known:
            there_are = f"There are: {', '.join(known)}; or give" if known else registry.NO_RECIPES
            raise UsageError(
                f"there is no recipe {target!r}",
                where=f"{where}: extends" if where else None,
                remedy=f"{did_you_mean(target, known)}{there_are} FILE.yaml or FILE.py:Task",
            )
        recipe = known[target]
    return str(recipe), recipe.read_text(encoding="utf-8")


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a YAML file.

    Raises:
        UsageError: the file cannot be read, or is not a mapping of sections in YAML.
    """
    return parse_yaml(_read_bytes(path), str(path))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error


def parse_yaml(content: bytes | str, where: str) -> dict[str, Any]:
    """The sections in the `content` of a YAML file. `where` names the file in errors.

    Raises:
        UsageError: the content is not a mapping of sections in YAML.
    """
    try:
        values = parsed(content.decode() if isinstance(content, bytes) else content)
    except (
        yaml.YAMLError,
        ValueError,
    ) as error:  # ValueError: the file is not UTF-8, or holds an impossible date or number
        raise UsageError(f"not YAML: {error}", where=where, remedy="repair the file") from error
    if not isinstance(values, dict):
        raise UsageError(
            "not a YAML mapping of sections", where=where, remedy="write sections such as `task: {kind: toy}`"
        )
    return values


def alternatives() -> Iterator[tuple[str, str, str]]:
    """(section, key, other key) for keys that exclude each other, in both orders."""
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            for first, second in field.annotation.alternatives:
                yield name, first, second
                yield name, second, first
