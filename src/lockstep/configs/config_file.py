"""From a recipe, a file or Python values to a checked `RunConfig`, and back.

It imports no torch, so that a wrong key is reported before anything slow is loaded.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from lockstep.configs import registry
from lockstep.configs.config_layers import Layers, alternatives, parsed, read_numbers_as_today, read_target, read_yaml
from lockstep.core.config import other_words
from lockstep.core.config.sections import RunConfig
from lockstep.core.config.sections import training_keys as training_keys
from lockstep.core.errors import UsageError, did_you_mean

Origin = Callable[[str], str]  # from a key's dotted path to the place where it was set: the command line, or a file


_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class YamlDumper(_Dumper):  # type: ignore[misc]
    """Writes values so that `config_layers.parsed` reads them back unchanged: the text '1e-8' gets quotes."""


read_numbers_as_today(YamlDumper)


def to_yaml(config: RunConfig) -> str:
    """All keys of `config`, in the form that `load` reads."""
    return yaml.dump(config.model_dump(by_alias=True), Dumper=YamlDumper, sort_keys=False)


def recipes() -> dict[str, str]:
    """The first comment of each recipe, by the recipe's name."""
    return {
        name: file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        for name, file in registry.recipes().items()
    }


def load(target: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a recipe's name, a YAML file or `FILE.py:Task`, with `key=value` overrides.

    Raises:
        UsageError: something is wrong. The error names file, key and value of all faults at once.
    """
    layers = read_target(target)
    return parse(layers.values, layers.name, overrides, sources=layers.sources)


def without_suggestions(layers: Layers, overrides: Sequence[str]) -> dict[str, Any]:
    """The values of a config without those that are filled in because they suit the task."""
    raw: dict[str, Any] = copy.deepcopy(layers.values)
    _override(raw, overrides, [])
    return RunConfig.model_validate(raw).model_dump(by_alias=True)


def read_run(
    run_dir: Path, overrides: Sequence[str] = (), allowed: Sequence[str] = (), file: Path | None = None
) -> RunConfig:
    """The config that a run directory records.

    Args:
        overrides: `key=value` on the command line.
        allowed: the keys that may be overridden, and all keys below them.
        file: of an earlier config of the run. None: its `config.yaml`.

    Raises:
        UsageError: not a run directory, or an override is wrong or not allowed.
    """
    path = file or run_dir / "config.yaml"
    if not path.is_file():
        raise UsageError(
            "not a run directory: it has no config.yaml",
            where=str(run_dir),
            remedy="give the directory of a run, such as runs/digits",
        )
    for override in overrides:
        key = override.partition("=")[0]
        if not any(f"{key}.".startswith(f"{name}.") for name in allowed):
            raise UsageError(
                f"{key} belongs to the training of this run",
                where="command line",
                remedy=f"here, only these keys can be changed: {', '.join(allowed)}",
            )
    return parse(read_yaml(path), str(path), overrides, needs_task=False)


def with_task_option(config: RunConfig, key: str, value: Any, where: str) -> RunConfig:
    """`config` with a different value of an option of its task.

    Args:
        where: the place of the value, for errors.

    Raises:
        UsageError: this kind of task does not have this option or value. (A user's own class says so when it is
            made.)
    """
    task, problems = _check_task(config.task | {key: value}, lambda _: where, epochs=None)
    if task is None:
        raise UsageError("\n  ".join(["the configuration has errors:", *problems]))
    return config.model_copy(update={"task": task})


def with_kept_task(config: RunConfig, run_dir: Path, tell: Callable[[str], None]) -> RunConfig:
    """`config` with the task's code that the run keeps in `source/`, if the task's own file is not there.

    So a run directory that was copied to another machine can be evaluated, and its weights exported.

    Args:
        tell: shows a line that says which code is used.
    """
    path, _, name = str(config.task.get("kind", "")).rpartition(":")
    if not path.endswith(".py") or Path(path).is_file():
        return config
    parts = Path(path).parts
    for place in range(1, len(parts)):  # the longest end of the path: a file of a package is in the package's folder
        kept = run_dir.joinpath("source", *parts[place:])
        if kept.is_file():
            tell(f"{path} is not there: the task's code is taken from {kept}")
            return config.model_copy(update={"task": config.task | {"kind": f"{kept.resolve()}:{name}"}})
    return config


def parse(
    values: Mapping[str, Any],
    where: str = "config",
    overrides: Sequence[str] = (),
    needs_task: bool = True,
    sources: Mapping[str, str] | None = None,
) -> RunConfig:
    """The config of `values` with `overrides`.

    Args:
        where: the source of `values`, for errors.
        needs_task: whether a missing task is an error.
        sources: the source of single keys by dotted path, if it is not `where`.

    Raises:
        UsageError: something is wrong. The error names all faults at once.
    """
    problems: list[str] = []
    raw: dict[str, Any] = _plain(values, "", where, problems)
    given = _override(raw, overrides, problems)
    _suggest(raw)

    def origin(path: str) -> str:
        """`command line` if an override set the key at `path`, or a key above or below it. Otherwise the file."""
        return "command line" if related(path, given) else (sources or {}).get(related(path, sources or {}), where)

    config: RunConfig | None = None
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        problems += _describe(error, model=RunConfig, raw=raw, prefix="", origin=origin)
    if needs_task and "task" not in raw:
        problems.append(f"{where}: task: is missing")
    if isinstance(raw.get("task"), dict) and (needs_task or raw["task"]):
        epochs = config.train.known_epochs if config is not None and needs_task else None
        task, faults = _check_task(raw["task"], origin, epochs=epochs)
        problems += faults
        if config is not None and task is not None:
            config.task = task
    if problems or config is None:
        raise UsageError("\n  ".join(["the configuration has errors:", *problems]))
    return config


def related(path: str, keys: Iterable[str]) -> str:
    """The first of `keys` that is `path`, or is above or below it; empty if there is none."""
    return next((key for key in keys if f"{path}.".startswith(f"{key}.") or f"{key}.".startswith(f"{path}.")), "")


def _override(raw: dict[str, Any], overrides: Sequence[str], problems: list[str]) -> set[str]:
    """Set the keys of `overrides` in `raw`, and remove the keys that they exclude.

    Args:
        problems: gets a line for each override that is not key=value.

    Returns:
        the keys that were set.
    """
    given: set[str] = set()
    meant = ""
    for override, after in itertools.zip_longest(overrides, overrides[1:]):
        key, equals, text = override.partition("=")
        if not equals and meant:  # it is the value of the word before
            meant = ""
            continue
        meant = "" if equals else other_words.meant(override, after if after and "=" not in after else None)
        if not equals or not all(key.split(".")):
            problems.append(f"command line: {override!r} is not key=value; {other_words.to_write(meant)}".rstrip("; "))
            continue
        try:
            value = parsed(text)
        except (yaml.YAMLError, ValueError) as error:
            problems.append(f"command line: {key}: {text!r} is not YAML: {error}")
            continue
        given.add(key)
        _assign(raw, key.split("."), value)
    batch = raw.get("batch")
    if isinstance(batch, dict) and given & {"batch.per_rank", "batch.accumulate"}:
        for other in {"global", "micro"} - {key.removeprefix("batch.") for key in given}:
            batch.pop(other, None)  # the keys on the command line take the place of the recipe's global batch
    for section, key, other in alternatives():
        place = raw.get(section)
        if f"{section}.{key}" in given and f"{section}.{other}" not in given and isinstance(place, dict):
            place.pop(other, None)
    return given


def _plain(value: Any, path: str, where: str, problems: list[str]) -> Any:
    """A copy of `value` in the types of YAML (tuples become lists), so that YAML reads it back unchanged."""
    if isinstance(value, Mapping):
        # An epoch may be a key: `batch.micro: {0: 256, 20: 128}`. A bool is an int: YAML reads `yes` as True.
        known = {key: type(key) in (str, int, float) for key in value}
        problems += [f"{where}: {path}{key!r}: a key must be text" for key in value if not known[key]]
        return {key: _plain(item, f"{path}{key}.", where, problems) for key, item in value.items() if known[key]}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}{number}.", where, problems) for number, item in enumerate(value)]
    if value is not None and type(value) not in (bool, int, float, str):
        problems.append(
            f"{where}: {path.rstrip('.')}: {value!r} is a {type(value).__name__}; use numbers, text, lists and mappings"
        )
    return value


def _assign(raw: Any, path: list[str], value: Any) -> None:
    """Set the key at `path` in nested mappings and lists. Missing mappings are made."""
    for number, key in enumerate(path):
        place: Any = int(key) if isinstance(raw, list) and key.isdigit() and int(key) < len(raw) else key
        if isinstance(raw, list) and isinstance(place, str):
            raw.append({key: value})  # there is no such item: the validation reports the new item
            return
        if number == len(path) - 1:
            raw[place] = value
            return
        inner = raw[place] if isinstance(raw, list) else raw.get(place)
        if not isinstance(inner, dict | list):
            raw[place] = inner = {}
        raw = inner


def _suggest(raw: dict[str, Any]) -> None:
    """Fill in the values that suit the task.

    A section with a different `name` (of optimizer or schedule) stays as it is.
    """
    task = raw.get("task")
    kind = task.get("kind") if isinstance(task, dict) else None
    if not isinstance(task, dict) or not isinstance(kind, str) or ".py:" in kind:
        return
    options_class = registry.options_class(kind)
    if options_class is None:
        return
    try:
        options = options_class.model_validate({key: value for key, value in task.items() if key != "kind"})
    except ValidationError:  # `_check_task` reports it
        return
    for section, values in options.suggestions().items():
        given = raw.setdefault(section, {})
        if not isinstance(given, dict) or given.get("name", values.get("name")) != values.get("name"):
            continue
        excluded = {other for name, key, other in alternatives() if name == section and key in given}
        if section == "train" and "epochs" in given:
            excluded.add("min_steps")
        raw[section] = {key: value for key, value in values.items() if key not in excluded} | given


def _check_task(task: dict[str, Any], origin: Origin, *, epochs: int | None) -> tuple[dict[str, Any] | None, list[str]]:
    """The task section with all options, and the problems. A user's own class checks its keys when it is made.

    Args:
        epochs: length of the training. None: it is not known, or nothing is trained.
    """
    kind = task.get("kind")
    if isinstance(kind, str) and ".py:" in kind:
        return dict(task), []
    options_class = registry.options_class(kind) if isinstance(kind, str) else None
    if options_class is None:
        known = registry.kinds()
        there_are = f"there are {', '.join(known)} and" if known else registry.NO_RECIPES
        listed = f"{did_you_mean(kind, known)}{there_are} FILE.py:Class"
        return None, [f"{origin('task.kind')}: task.kind: {kind!r} is not a kind; {listed}"]
    options = {key: value for key, value in task.items() if key != "kind"}
    try:
        checked = options_class.model_validate(options)
        try:
            checked = checked.for_epochs(epochs)
        except ValueError as error:
            return None, [f"{origin('task')}: task.{error}"]
        never = {} if epochs is None else checked.never_reached(epochs)
        problems = [f"{origin(f'task.{key}')}: task.{key}: {what}" for key, what in never.items()]
        return {"kind": kind, **checked.model_dump()}, problems
    except ValidationError as error:
        return None, _describe(error, model=options_class, raw=options, prefix="task.", origin=origin)


def _hint(word: str, value: Any) -> str:
    """What to write for a key that is unknown here, but is a word of others or an option. Empty: it is not known."""
    if isinstance(value, Mapping):  # `trainer.max_epochs=3`: the word is the inner key
        return ", ".join(filter(None, (_hint(str(inner), value[inner]) for inner in value)))
    found = other_words.meant(word, None if value is None or isinstance(value, list) else str(value))
    return f"it is an option: {found}" if found.startswith("--") else other_words.to_write(found)


def _describe(error: ValidationError, model: type[BaseModel], raw: Any, prefix: str, origin: Origin) -> list[str]:
    """A line for each key that is wrong.

    If a value may have several types, pydantic reports an error for each type; they share a line. If a type fits and
    only a key further inside is wrong, the value as a whole is not reported.
    """
    lines: dict[str, str] = {}
    for fault in error.errors():
        keys, section = _place(model, raw, fault["loc"])
        path = (prefix + ".".join(keys)).removesuffix(".")  # a fault of the whole section has no keys
        where = f"{origin(path)}: {path}"
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            known = _keys(section)
            parent = path.rpartition(".")[0]
            hint = did_you_mean(keys[-1], known, f"{parent}." if parent else "")
            if re.search(r"\w:\S", keys[-1]):  # {key:value} is one key
                hint = "YAML needs a space after a colon; "
            elif "." in keys[-1]:  # of a mapping: on the command line, a point begins a section
                first, _, rest = keys[-1].partition(".")
                hint = f"write sections as mappings: {{{first!r}: {{{rest!r}: ...}}}}; "
            elif words := _hint(keys[-1], fault["input"]):
                lines[path] = f"{where}: unknown key; {words}"
                continue
            lines[path] = f"{where}: unknown key; {hint}known here: {', '.join(known)}"
        elif path in lines:
            lines[path] += f", or {message.removeprefix('Input should be ')}"
        elif fault["type"] == "missing":
            lines[path] = f"{where}: is missing"
        elif fault["type"] == "model_type":
            lines[path] = f"{where}: {fault['input']!r}: must be a section with keys of: {', '.join(_keys(section))}"
        else:
            shown = "" if fault["type"] == "value_error" else f" {fault['input']!r}:"
            lines[path] = f"{where}:{shown} {message}"
    return [line for path, line in lines.items() if not any(other.startswith(f"{path}.") for other in lines)]


def _place(model: type[BaseModel], raw: Any, loc: Sequence[str | int]) -> tuple[list[str], type[BaseModel] | None]:
    """The keys in pydantic's `loc` as a user writes them, and the innermost section that they lead to.

    If a value may have several types, `loc` also names the type that pydantic tried. Such names are not keys.
    """
    keys: list[str] = []
    sections, section, value = [model], model, raw
    for part in loc:
        held = part in value if isinstance(value, Mapping) else isinstance(value, list) and isinstance(part, int)
        if not held and not any(part in _keys(one) for one in sections):
            continue
        keys.append(str(part))
        is_missing = isinstance(value, list) and isinstance(part, int) and part >= len(value)
        value = value[part] if held and not is_missing else None
        if not isinstance(part, int):  # the items of a list are of the list's section
            fields = {field.alias or name: field for one in sections for name, field in one.model_fields.items()}
            sections = list(_sections(fields[part].annotation)) if part in fields else []
        section = next(iter(sections), section)
    return keys, section


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a value of this type may be, or may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


def _keys(section: type[BaseModel] | None) -> list[str]:
    """The keys of a section. Empty if there is none."""
    return [field.alias or name for name, field in section.model_fields.items()] if section else []
