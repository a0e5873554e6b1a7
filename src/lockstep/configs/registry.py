"""Names of tasks and recipes, which distributions declare as entry points: Lockstep's own and any others.

Importing this module and looking up options loads no torch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep.core import plugins
from lockstep.core.entry_points import entry_points
from lockstep.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from lockstep.configs.task_options import TaskOptions
    from lockstep.core.data.cache_options import CacheOptions
    from lockstep.core.task import Task


NO_RECIPES = "no recipes are installed: in the clone of Lockstep, pip install -e packages/recipes; or give"
"""Begins the remedy of an error, if a recipe or a kind of task is asked for."""


def kinds() -> list[str]:
    """Names that `task.kind` may have, besides `FILE.py:Class`."""
    return list(entry_points("lockstep.tasks"))


def options_class(kind: str) -> type[TaskOptions] | None:
    """The options of a kind of task. None if there is no such kind.

    Raises:
        UsageError: an entry point declares the kind and cannot be loaded. Names the distribution.
    """
    entry = entry_points("lockstep.tasks").get(kind)
    if entry is None:
        return None
    from lockstep.configs.task_options import TaskOptions  # before the entry: it may name this module by its path

    loaded = plugins.load(entry)
    if not (inspect.isclass(loaded) and issubclass(loaded, TaskOptions) and hasattr(loaded, "task")):
        raise plugins.unusable(entry, "is not a subclass of lockstep.TaskOptions with an attribute `task`")
    return loaded


def preload_modules(kind: str) -> list[str]:
    """Modules that every rank of a kind of task of Lockstep imports; none for a user's class or other distributions."""
    entry = entry_points("lockstep.tasks").get(kind)
    if entry is None or not entry.is_own:
        return []
    options = options_class(kind)
    assert options is not None
    return [options.task.partition(":")[0], *options.preload]


def recipes() -> dict[str, Traversable]:
    """The YAML files of all recipes by name: those of Lockstep first.

    Raises:
        UsageError: an entry point declares a package of recipes that cannot be loaded. Names the distribution.
    """
    found: dict[str, Traversable] = {}
    for entry in entry_points("lockstep.recipes").values():
        files = _yaml_files(resources.files(plugins.load(entry)))
        found |= {name: file for name, file in files.items() if name not in found}
    return found


def own_recipe(name: str) -> Traversable | None:
    """The YAML file of a recipe of Lockstep. This does not load other distributions, which may take time or fail."""
    entries = [entry for entry in entry_points("lockstep.recipes").values() if entry.is_own]
    files = [resources.files(plugins.load(entry)).joinpath(f"{name}.yaml") for entry in entries]
    return next((file for file in files if file.is_file()), None)


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
                shown = repr(value) if isinstance(value, str) else "a cache of decoded images"
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
    """What makes the task that `FILE.py:NAME` names: a class, a function that returns a task, or an adapter's.

    Raises:
        UsageError: there is no such file or no such class, or the class lacks a method that must be written.
    """
    from lockstep.core.task import Task

    path, _, name = kind.rpartition(":")
    if not Path(path).is_file():
        remedy = "the task's Python file must be where it was when the run began; paths start in the working directory"
        raise UsageError(f"no such file in {Path.cwd()}", where=path, remedy=remedy)
    module = plugins.import_file(Path(path).resolve(), prefix=plugins.USER_PREFIX, where=path, is_main=True)
    found: object = getattr(module, name, None)
    if inspect.isfunction(found):
        return _of_function(found, module, path)
    adapted = _adapted(found, module, path)
    if adapted is not None:
        return adapted
    return plugins.class_of(module, name, Task, where=path)  # type: ignore[type-abstract]  # a base may be abstract


def _of_function(function: Callable[..., Any], module: ModuleType, path: str) -> Callable[..., Task]:
    """A function that returns a task, or something that an adapter makes a task of."""
    from lockstep.core.task import Task

    @functools.wraps(function)
    def make(**arguments: Any) -> Task:
        made = function(**arguments)
        if isinstance(made, Task):
            return made
        adapted = _adapted(made, module, path)
        if adapted is None:
            what, where = f"it returned a {type(made).__name__}", f"{path}:{function.__name__}"
            remedy = "return a lockstep.Task, such as lockstep_recipes.adapters.lightning(module, datamodule)"
            raise UsageError(what, where=where, remedy=remedy)
        return adapted()

    return make


def _adapted(found: Any, module: ModuleType, where: str) -> Callable[..., Task] | None:
    """What an adapter makes of an object of the file. None: no adapter knows it."""
    adapters = (plugins.load(entry) for entry in entry_points("lockstep.adapters").values())
    return next((made for adapt in adapters if (made := adapt(found, module, where)) is not None), None)


def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _yaml_files(folder: Traversable) -> dict[str, Traversable]:
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}
