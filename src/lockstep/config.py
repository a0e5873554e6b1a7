"""The configuration of a run: one pydantic model per YAML section. Only `run.py` and `cli.py` read it.

Imports no torch: a wrong key is reported before anything heavy is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from lockstep.errors import UsageError, did_you_mean

_GLOBAL_BATCH = 32


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers: `1e-8` is one. (PyYAML follows YAML 1.1, where it is text.)"""


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back the same: the text '1e-8' gets quotes."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


class Section(BaseModel):
    """A YAML section. Unknown keys are errors, and so is a value of another type: `yes` is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ToyTask(Section):
    """Synthetic regression; see `lockstep.tasks.toy.Toy`."""

    kind: Literal["toy"]
    samples: Annotated[int, Field(ge=0)] = 1000
    eval_samples: Annotated[int, Field(ge=0)] = 200
    hidden: PositiveInt = 10
    layers: PositiveInt = 1
    double: bool = False


class ClassificationTask(Section):
    """Image classification; see `lockstep.tasks.classification.Classification`."""

    kind: Literal["classification"]
    image_size: Annotated[int, Field(ge=4)] = 32
    channels: Literal[1, 3] = 3
    width: Annotated[int, Field(ge=4, multiple_of=4)] = 32
    shift: Annotated[int, Field(ge=0)] = 0


class UserTask(Section):
    """A class in a user's file; further keys go to its constructor."""

    model_config = ConfigDict(extra="allow")
    kind: str


BUILT_IN: dict[str, type[Section]] = {"toy": ToyTask, "classification": ClassificationTask}


class DataConfig(Section):
    """Where samples come from. workers: loader processes per rank. on_error: what an unreadable sample does."""

    train: str | None = None
    eval: str | None = None
    workers: Annotated[int, Field(ge=0)] = 0
    on_error: Literal["raise", "skip"] = "raise"
    drop_last: bool = False


class BatchConfig(Section):
    """Samples per update (`global`) and per forward pass (`micro`, None: as few passes as possible).

    `per_rank` x `accumulate` x ranks may be given instead: the global batch this makes at the first launch is kept.
    """

    global_: PositiveInt | None = Field(None, alias="global")
    micro: PositiveInt | None = None
    per_rank: PositiveInt | None = None
    accumulate: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_way(self) -> BatchConfig:
        if self.global_ is not None and (self.per_rank or self.accumulate):
            raise ValueError("give either global (and micro) or per_rank and accumulate, not both")
        if self.accumulate and not self.per_rank:
            raise ValueError("accumulate needs per_rank")
        if self.micro and self.per_rank:
            raise ValueError("per_rank is the micro-batch; leave micro out")
        if self.micro and self.micro > (self.global_ or _GLOBAL_BATCH):
            raise ValueError(f"micro ({self.micro}) is above global ({self.global_ or _GLOBAL_BATCH}); use micro <= global")
        return self

    def resolve(self, world: int) -> BatchConfig:
        """With `global` and `micro` as numbers, for a first launch on `world` ranks."""
        if self.per_rank:
            return BatchConfig.model_validate({"global": self.per_rank * (self.accumulate or 1) * world, "micro": self.per_rank})
        return self.model_copy(update={"global_": self.global_ or _GLOBAL_BATCH})


class TrainConfig(Section):
    """How long: `epochs` or `steps`; and how often to evaluate (0: never)."""

    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None
    eval_every_epochs: Annotated[int, Field(ge=0)] | None = None
    eval_every_steps: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TrainConfig:
        if self.epochs and self.steps:
            raise ValueError("give either epochs or steps, not both")
        if self.eval_every_epochs is not None and self.eval_every_steps is not None:
            raise ValueError("give either eval_every_epochs or eval_every_steps, not both")
        return self


class GroupConfig(Section):
    """Parameters by name pattern (`*` and `?`), with their own learning rate and weight decay."""

    name: str
    match: Annotated[list[str], Field(min_length=1)]
    lr: PositiveFloat | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class OptimConfig(Section):
    """Any class of torch.optim; `args` are its further arguments (momentum, betas, ...)."""

    name: str = "AdamW"
    lr: PositiveFloat = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    clip_norm: PositiveFloat | None = None
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    reference_batch: PositiveInt = 32
    groups: list[GroupConfig] = []
    args: dict[str, Any] = {}

    @model_validator(mode="after")
    def _names(self) -> OptimConfig:
        names = [group.name for group in self.groups]
        if len({*names, "default"}) <= len(names):
            raise ValueError("group names must differ from each other and from 'default'")
        return self


class ScheduleConfig(Section):
    """Learning rate over updates; see `lockstep.engine.schedule.Schedule`."""

    name: Literal["constant", "linear", "cosine", "step", "one_cycle", "polynomial"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    end_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    step_epochs: PositiveFloat = 1
    gamma: PositiveFloat = 0.1
    power: PositiveFloat = 1.0


class ParallelConfig(Section):
    """How the model is spread over ranks. timeout_s: a collective that takes longer is an error."""

    strategy: Literal["single", "ddp"] = "ddp"
    find_unused_parameters: bool = False
    timeout_s: PositiveFloat = 600.0


class CheckpointConfig(Section):
    """every_steps: 0 saves at the end only."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    keep_last: PositiveInt = 3


class LogConfig(Section):
    """What is written how often."""

    every_steps: PositiveInt = 50
    tensorboard: bool = True


class RunConfig(Section):
    """A whole run. Everything but the task and its data has a default."""

    name: str = "run"
    seed: Annotated[int, Field(ge=0)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    task: dict[str, Any]
    data: DataConfig = DataConfig()
    batch: BatchConfig = Field(default_factory=lambda: BatchConfig.model_validate({}))
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    def to_yaml(self) -> str:
        """All keys, as `load` reads them."""
        return yaml.dump(self.model_dump(by_alias=True), Dumper=_Dumper, sort_keys=False)


# ---- what determines the training

_FREE = ("name", "device", "data.workers", "batch.micro", "train", "parallel", "checkpoint", "log")


def determining(config: RunConfig) -> dict[str, Any]:
    """The keys, by dotted path, whose change would change the weights; world size, micro-batch and logs do not."""
    flat = _flatten(config.model_dump(by_alias=True))
    return {key: value for key, value in flat.items() if not any(key == free or key.startswith(f"{free}.") for free in _FREE)}


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        path = f"{prefix}{key}"
        flat |= _flatten(item, f"{path}.") if isinstance(item, Mapping) else {path: item}
    return flat


# ---- reading


def recipes() -> dict[str, str]:
    """Names of the shipped recipes, and what their first comment says."""
    files = sorted(resources.files("lockstep.recipes").iterdir(), key=lambda file: file.name)
    texts = {file.name.removesuffix(".yaml"): file.read_text() for file in files if file.name.endswith(".yaml")}
    return {name: text.splitlines()[0].removeprefix("# ") for name, text in texts.items()}


def load(target: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe name, a YAML file or `FILE.py:Task`, and apply `key=value` overrides.

    Raises:
        UsageError: names file, key and value of everything that is wrong, all at once.
    """
    values, where = _read(target)
    return parse(values, where, overrides)


def read_run(run_dir: Path) -> RunConfig:
    """The config that a run directory records.

    Raises:
        UsageError: not a run directory.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise UsageError("not a run directory: it has no config.yaml", where=str(run_dir), remedy="give the directory of a run, such as runs/digits")
    return parse(_read_yaml(path), str(path))


def parse(values: Mapping[str, Any], where: str = "config", overrides: Sequence[str] = ()) -> RunConfig:
    """Check `values` under `overrides`; `where` names them in errors."""
    problems: list[str] = []
    raw: dict[str, Any] = _plain(values, "", where, problems)
    given: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            problems.append(f"command line: {override!r} is not key=value")
            continue
        try:
            value = yaml.load(text, _Loader)
        except (yaml.YAMLError, ValueError) as error:
            problems.append(f"command line: {key}: {text!r} is not YAML: {error}")
            continue
        given.add(key)
        _assign(raw, key.split("."), value)
    if "batch" in raw and any(key in given for key in ("batch.per_rank", "batch.accumulate")) and isinstance(raw["batch"], dict):
        for other in {"global", "micro"} - {key.removeprefix("batch.") for key in given}:
            raw["batch"].pop(other, None)  # a recipe's global batch gives way to what the user states instead
    for one, other in (("epochs", "steps"), ("eval_every_epochs", "eval_every_steps")):
        for mine, theirs in ((one, other), (other, one)):
            if f"train.{mine}" in given and f"train.{theirs}" not in given and isinstance(raw.get("train"), dict):
                raw["train"].pop(theirs, None)

    def origin(path: str) -> str:
        """The override that set `path`, or what is above or below it; else the file."""
        return "command line" if any(f"{path}.".startswith(f"{key}.") or f"{key}.".startswith(f"{path}.") for key in given) else where

    config: RunConfig | None = None
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        problems += [_describe(fault, RunConfig, "", origin) for fault in error.errors()]
    if isinstance(raw.get("task"), dict):
        task, faults = _check_task(raw["task"], origin)
        problems += faults
        if config is not None and task is not None:
            config.task = task
    if problems or config is None:
        raise UsageError("\n  ".join(["the configuration has errors:", *problems]))
    return config


def _read(target: str) -> tuple[dict[str, Any], str]:
    path, _, attribute = target.partition(":")
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise UsageError("no such file", where=path, remedy="give the path of your Python file, as FILE.py:Task")
        if not attribute:
            raise UsageError("no class is named", where=path, remedy=f"write {path}:MyTask")
        return {"name": Path(path).stem, "task": {"kind": f"{os.path.abspath(path)}:{attribute}"}}, target
    if target.endswith((".yaml", ".yml")):
        if not Path(target).is_file():
            raise UsageError("no such file", where=target, remedy="`lockstep recipes` lists the recipes that need no file")
        values = _read_yaml(Path(target))
    else:
        known = recipes()
        if target not in known:
            hint = did_you_mean(target, known)
            raise UsageError(f"there is no recipe {target!r}", remedy=f"{hint}There are: {', '.join(known)}; or give FILE.yaml or FILE.py:Task")
        values = yaml.load(resources.files("lockstep.recipes").joinpath(f"{target}.yaml").read_text(), _Loader)
    values.setdefault("name", Path(target).stem)
    return values, target


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date or number that is none
        raise UsageError(f"not YAML: {error}", where=str(path), remedy="repair the file") from error
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path)) from error
    if not isinstance(values, dict):
        raise UsageError("not a YAML mapping of sections", where=str(path), remedy="write sections such as `task: {kind: toy}`")
    return values


def _plain(value: Any, path: str, where: str, problems: list[str]) -> Any:
    """A copy of `value` in YAML's own types (tuples become lists), so that it is the same when it is read back."""
    if isinstance(value, Mapping):
        problems += [f"{where}: {path}{key!r}: a key must be text" for key in value if not isinstance(key, str)]
        return {key: _plain(item, f"{path}{key}.", where, problems) for key, item in value.items() if isinstance(key, str)}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}{number}.", where, problems) for number, item in enumerate(value)]
    if value is not None and type(value) not in (bool, int, float, str):
        problems.append(f"{where}: {path.rstrip('.')}: {value!r} is a {type(value).__name__}; use numbers, text, lists and mappings")
    return value


def _assign(raw: Any, path: list[str], value: Any) -> None:
    """Set `path` in nested mappings and lists, making mappings where there is nothing."""
    for number, key in enumerate(path):
        place: Any = int(key) if isinstance(raw, list) and key.isdigit() and int(key) < len(raw) else key
        if isinstance(raw, list) and isinstance(place, str):
            raw.append({key: value})  # no such item: validation says what is wrong with this one
            return
        if number == len(path) - 1:
            raw[place] = value
            return
        inner = raw[place] if isinstance(raw, list) else raw.get(place)
        if not isinstance(inner, dict | list):
            raw[place] = inner = {}
        raw = inner


def _check_task(task: dict[str, Any], origin: Any) -> tuple[dict[str, Any] | None, list[str]]:
    """The task section under its kind's own model; a user's own class checks its keys when it is made."""
    kind = task.get("kind")
    if isinstance(kind, str) and ".py:" in kind:
        return UserTask.model_validate(task).model_dump(), []
    if not isinstance(kind, str) or kind not in BUILT_IN:
        hint = did_you_mean(kind, BUILT_IN)
        return None, [f"{origin('task.kind')}: task.kind: {kind!r} is not a kind; {hint}there are {', '.join(BUILT_IN)} and FILE.py:Class"]
    try:
        return BUILT_IN[kind].model_validate(task).model_dump(), []
    except ValidationError as error:
        return None, [_describe(fault, BUILT_IN[kind], "task.", origin) for fault in error.errors()]


def _describe(fault: Any, model: type[BaseModel], prefix: str, origin: Any) -> str:
    path = prefix + ".".join(str(part) for part in fault["loc"])
    where = origin(path)
    if fault["type"] == "extra_forbidden":
        known = _keys(model, fault["loc"][:-1])
        parent = path.rpartition(".")[0]
        hint = did_you_mean(fault["loc"][-1], known, f"{parent}." if parent else "")
        return f"{where}: {path}: unknown key; {hint}known here: {', '.join(known)}"
    if fault["type"] == "missing":
        return f"{where}: {path}: is missing"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {path}: {message}" if fault["type"] == "value_error" else f"{where}: {path}: {fault['input']!r}: {message}"


def _keys(model: Any, loc: Iterable[Any]) -> list[str]:
    """Keys of the section at `loc`."""
    for part in loc:
        if isinstance(part, int):
            continue
        field = next(f for name, f in model.model_fields.items() if part in (name, f.alias))
        model = GroupConfig if part == "groups" else field.annotation
    return [field.alias or name for name, field in model.model_fields.items()]
