"""Names of tasks and recipes: the shipped ones, and those that other distributions declare as entry points.

Importing this module and looking up options loads no torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core import plugins
from lockstep.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from lockstep.core.task import Task
    from lockstep.recipes.task_options import TaskOptions
    from lockstep.tasks.vision.pictures.cache import CacheOptions

# These are found without installed metadata, and no entry point can replace them.
_SHIPPED_TASKS = {
    "toy": "lockstep.tasks.toy.options:ToyOptions",
    "classification": "lockstep.tasks.vision.classification.options:ClassificationOptions",
    "detection": "lockstep.tasks.vision.detection.options:DetectionOptions",
    "segmentation": "lockstep.tasks.vision.segmentation.options:SegmentationOptions",
    "text": "lockstep.tasks.text.options:TextOptions",
    "lm": "lockstep.tasks.lm.options:LmOptions",
    "volume_risk": "lockstep.tasks.ct.options:VolumeRiskOptions",
}
_SHIPPED_RECIPES = "lockstep.recipes"


def kinds() -> list[str]:
    """Names that `task.kind` may have, besides `FILE.py:Class`."""
    return [*_SHIPPED_TASKS, *(name for name in plugins.entry_points("lockstep.tasks") if name not in _SHIPPED_TASKS)]


def options_class(kind: str) -> type[TaskOptions] | None:
    """The options of a kind of task. None if there is no such kind.

    Raises:
        UsageError: an entry point declares the kind and cannot be loaded. Names the distribution.
    """
    if kind in _SHIPPED_TASKS:
        found: type[TaskOptions] = _attribute(_SHIPPED_TASKS[kind])
        return found
    entry = plugins.entry_points("lockstep.tasks").get(kind)
    if entry is None:
        return None
    from lockstep.recipes.task_options import TaskOptions  # before the entry: it may name this module by its path

    loaded = plugins.load(entry)
    if not (inspect.isclass(loaded) and issubclass(loaded, TaskOptions) and hasattr(loaded, "task")):
        raise plugins.unusable(entry, "is not a subclass of lockstep.TaskOptions with an attribute `task`")
    return loaded


def preload_modules(kind: str) -> list[str]:
    """Modules that every rank of a shipped kind of task imports; none for a user's class or another distribution's."""
    if kind not in _SHIPPED_TASKS:
        return []
    options = options_class(kind)
    assert options is not None
    return [options.task.partition(":")[0], *options.preload]


def recipes() -> dict[str, Traversable]:
    """The YAML files of all recipes by name: the shipped ones first.

    Raises:
        UsageError: an entry point declares a package of recipes that cannot be loaded. Names the distribution.
    """
    found = _yaml_files(resources.files(_SHIPPED_RECIPES))
    for entry in plugins.entry_points("lockstep.recipes").values():
        files = _yaml_files(resources.files(plugins.load(entry)))
        found |= {name: file for name, file in files.items() if name not in found}
    return found


def shipped_recipe(name: str) -> Traversable | None:
    """The YAML file of a shipped recipe. This does not look for other distributions, which takes time."""
    file = resources.files(_SHIPPED_RECIPES).joinpath(f"{name}.yaml")
    return file if file.is_file() else None


def build_task(
    section: dict[str, Any],
    train: str | None,
    evaluation: str | None,
    cache: CacheOptions | None = None,
    *,
    fold: str | None = None,
) -> Task:
    """Make the task that the config's section `task` describes.

    Args:
        section: `kind` and the options. A named kind gets its options as one object; a class in a user's file gets
            them as keyword arguments.
        train, evaluation: the config's `data.train` and `data.eval`, for a constructor with parameters `train` and
            `eval`.
        cache: what `data.cache` asks for, for a constructor with a parameter `cache`.
        fold: the config's `data.fold`, for a constructor with a parameter `fold`.

    Raises:
        UsageError: there is no such file or class, the class lacks a method, or its constructor does not take a key.
            Names the keys that it takes.
    """
    if "kind" not in section:
        raise UsageError(
            "the config names no task",
            where="task",
            remedy="set task.kind, or give a Task object to fit, evaluate or predict. The run of a lockstep.Loop has "
            "no task: its script calls loop.evaluate and loop.save, and `lockstep report` shows the run",
        )
    arguments = {key: value for key, value in section.items() if key != "kind"}
    options = options_class(section["kind"])
    if options is not None:
        task_class: Callable[..., Task] = _attribute(options.task)
        arguments = {"options": options.model_validate(arguments)}
    else:
        task_class = maker_in_file(section["kind"])
    data = {"train": train, "eval": evaluation, "cache": cache, "fold": fold}
    return task_class(**_checked(task_class, arguments, data))


def _checked(task_class: Callable[..., Task], arguments: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """`arguments` and the values of `data` that are not None, if the constructor takes all of them."""
    class_name = getattr(task_class, "__name__", "it")
    parameters, data_keys = inspect.signature(task_class).parameters, set(data)
    data = {name: value for name, value in data.items() if value is not None}
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    known = [name for name, parameter in parameters.items() if parameter.kind not in variadic]
    keys = [name for name in known if name != "options"]
    takes = f"{class_name} takes: {', '.join(keys) or 'no keys'}"
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for key in arguments:
            if key not in known:
                raise UsageError("unknown key", where=f"task.{key}", remedy=f"{did_you_mean(key, known)}{takes}")
        for key, value in data.items():
            if key not in known:
                remedy = f"leave it out, or give the constructor a parameter {key!r}. {takes}"
                shown = repr(value) if isinstance(value, str) else "a cache of decoded pictures"
                raise UsageError(f"{class_name} has no use for {shown}", where=f"data.{key}", remedy=remedy)
    arguments = arguments | data
    required = [name for name in known if parameters[name].default is inspect.Parameter.empty]
    missing = [name for name in required if name not in arguments]
    if missing:
        listed = ", ".join(f"data.{name}" if name in data_keys else f"task.{name}" for name in missing)
        remedy = f"give {listed}, in the file or as key=value"
        raise UsageError(f"{class_name} needs {listed}", where="config", remedy=remedy)
    return arguments


def maker_in_file(kind: str) -> Callable[..., Task]:
    """The class that `FILE.py:Class` names. Or what makes a task of another library's class; see `adapters.named`.

    Raises:
        UsageError: there is no such file or no such class, or the class lacks a method that must be written.
    """
    from lockstep.adapters.named import maker
    from lockstep.core.task import Task

    path, _, name = kind.rpartition(":")
    if not Path(path).is_file():
        remedy = "the task's Python file must be where it was when the run began; paths start in the working directory"
        raise UsageError(f"no such file in {Path.cwd()}", where=path, remedy=remedy)
    module = plugins.import_file(Path(path).resolve(), prefix=plugins.USER_PREFIX, where=path, is_main=True)
    found = maker(getattr(module, name, None), module, path)
    if found is not None:
        return found
    return plugins.class_of(module, name, Task, where=path)  # type: ignore[type-abstract]  # a base may be abstract


def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _yaml_files(folder: Traversable) -> dict[str, Traversable]:
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}
