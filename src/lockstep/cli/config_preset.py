"""Machine presets: YAML files that say how a kind of machine runs a training, whichever recipe it is.

A preset sets the number of ranks (`nproc`), and keys of the config that may differ when a run resumes. Exceptions are
`precision` and `parallel.param_dtype`, which determine the training: a note says so. `tasks` has keys for kinds of
tasks. This module imports no torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from lockstep.configs import config_file, config_layers
from lockstep.core.config.sections import RunConfig, all_keys
from lockstep.core.errors import UsageError, did_you_mean

_NPROC, _NUMA = "nproc", "compute.numa_binding"
_EXCEPTIONS = ("precision", "parallel.param_dtype")
# These keys are free when a run resumes, but they say which run it is, how long it is, and when it is evaluated.
_OF_THE_RUN = ("name", "train.", "schedule.")


def allowed_keys() -> list[str]:
    """The keys of the config that a preset may set, by dotted path."""
    free = [path for path, determines in all_keys() if not determines and not path.startswith(_OF_THE_RUN)]
    return sorted([*free, *_EXCEPTIONS])


@dataclass(frozen=True)
class Preset:
    """The values of a preset: a kind of machine runs a training so."""

    name: str
    """As it is given on the command line."""
    where: str
    """The file, for errors."""
    nproc: str | None
    """Ranks on this machine: a number, or auto. None: the preset does not say."""
    keys: Mapping[str, Any]
    """Values of keys of the config, by dotted path."""
    tasks: Mapping[str, Mapping[str, Any]]
    """Further keys by the kind of the task, which take precedence."""

    def keys_for(self, config: RunConfig) -> dict[str, Any]:
        """The values for the config's kind of task, by dotted path."""
        return {**self.keys, **self.tasks.get(str(config.task.get("kind")), {})}

    def keys_beside(self, config: RunConfig, overrides: Sequence[str]) -> dict[str, Any]:
        """The values for the config's kind of task, but for keys that `overrides`, `key=value` texts, set."""
        given, keys = [f"{override.partition('=')[0]}." for override in overrides], self.keys_for(config)
        free = (
            path for path in keys if not any(f"{path}.".startswith(one) or one.startswith(f"{path}.") for one in given)
        )
        return {path: keys[path] for path in free}

    def apply(self, config: RunConfig, overrides: Sequence[str] = ()) -> RunConfig:
        """`config` with the values of this preset.

        `batch.micro` is the largest micro-batch for this machine: it is reduced to the global batch. It is left out if
        the config gives `batch.per_rank`, which is a micro-batch too. `compute.numa_binding` is left out on a machine
        without the program that it needs.

        Args:
            overrides: `key=value` texts, which `config` has already. They take precedence over the preset.

        Raises:
            UsageError: a value has the wrong type, or does not fit the other values. Names the file and the key.
        """
        values = config.model_dump(by_alias=True, exclude_unset=True)  # code of the task may imply the others
        for path, value in self.keys_beside(config, overrides).items():
            if path == _NUMA and shutil.which("numactl") is None:
                continue
            if path == "batch.micro":
                if config.batch.per_rank:
                    continue
                value = _at_most(value, config.batch.resolve(1).global_ or 1)
            section, _, key = path.rpartition(".")
            (values.setdefault(section, {}) if section else values)[key] = value
        return config_file.parse(values, self.where, needs_task=False)

    def notes(self, before: RunConfig, after: RunConfig) -> list[str]:
        """Lines for the terminal: the effects of this preset on a config that people should know.

        Args:
            before, after: the config without and with the preset.
        """
        lines = []
        both: Any = [(before.precision, after.precision), (before.parallel.param_dtype, after.parallel.param_dtype)]
        for key, (old, new) in zip(_EXCEPTIONS, both, strict=True):
            old = old or "null"
            if new not in (None, old):
                line = f"{key}={new} instead of {old}. It changes how numbers are rounded, so a run resumes only with "
                lines.append(f"{line}its own value; {key}={old} on the command line takes precedence")
        if before.batch.per_rank and self.nproc not in (None, "1"):
            line = "with batch.per_rank, the global batch of a new run depends on the number of ranks; batch.global "
            lines.append(f"{line}fixes it")
        if self.keys.get(_NUMA) and not after.compute.numa_binding and shutil.which("numactl") is None:
            line = "the program numactl is missing, so ranks are not bound to the CPUs near their GPUs"
            lines.append(f"{line} ({_NUMA})")
        return [f"preset {self.name}: {line}" for line in lines]

    def check_fits(self, config: RunConfig, ranks: int | None, gpus: int) -> None:
        """Check that this machine has a GPU for each rank, if the config asks for GPUs.

        Args:
            config: with this preset.
            ranks: on this machine; None: one for each GPU.
            gpus: GPUs of this machine.

        Raises:
            UsageError: it has too few. Names the presets that have fewer ranks.
        """
        if config.device != "cuda" or (gpus and (ranks or 1) <= gpus):
            return
        wanted = "a GPU for each rank" if ranks is None else f"{ranks} GPUs" if ranks > 1 else "a GPU"
        what = f"it needs {wanted}, and this machine has {gpus or 'none'}"
        raise UsageError(what, where=f"--preset {self.name}", remedy=_remedy(gpus))


def presets() -> dict[str, str]:
    """The first comment of each shipped preset, by the preset's name."""
    return {name: file.read_text("utf-8").splitlines()[0].removeprefix("# ") for name, file in _shipped().items()}


def read(target: str) -> Preset:
    """The preset with this name, or in this YAML file.

    Raises:
        UsageError: there is no such preset, or it has keys that a preset cannot have. Names all of them.
    """
    if target.endswith((".yaml", ".yml")):
        path = Path(target)
        if not path.is_file():
            raise UsageError("no such file", where=target, remedy="`lockstep doctor presets` lists the presets by name")
        return _checked(target, config_layers.read_yaml(path), target)
    known = _shipped()
    if target not in known:
        remedy = f"{did_you_mean(target, known)}There are: {', '.join(known)}; or give FILE.yaml"
        raise UsageError(f"there is no preset {target!r}", where="--preset", remedy=remedy)
    where = f"preset {target}"
    return _checked(target, config_layers.parse_yaml(known[target].read_text(encoding="utf-8"), where), where)


def _checked(name: str, values: dict[str, Any], where: str) -> Preset:
    tasks = values.pop("tasks", {})
    determining = {path for path, determines in all_keys() if determines} - {*_EXCEPTIONS}
    allowed = allowed_keys()
    keys: dict[str, Any] = {}
    problems: list[str] = []
    for path, value in _flat(values).items():
        # `task` has its own keys, such as task.image_size.
        if path in determining or any(path.startswith(f"{key}.") for key in determining):
            problems.append(f"{path}: determines the training, and a preset only says how a training is run")
        elif path.startswith(_OF_THE_RUN):
            problems.append(f"{path}: belongs to the run, and a preset only says how a training is run")
        elif path == _NPROC:
            if value != "auto" and (type(value) is not int or value < 1):
                problems.append(f"{path}: {value!r} is not a number of ranks; use a number from 1, or auto")
        elif path not in allowed:
            problems.append(f"{path}: unknown key; {did_you_mean(path, [_NPROC, *allowed])}")
        else:
            keys[path] = value
    if problems:
        remedy = "move keys of the training to the recipe, or to the command line. "
        remedy += f"A preset may set {_NPROC}, {', '.join(allowed)}"
        raise UsageError("\n  ".join(["the preset has errors:", *problems]), where=where, remedy=remedy)
    nproc = values.get(_NPROC)
    of_tasks = {kind: _checked(name, dict(own), f"{where}, tasks.{kind}").keys for kind, own in tasks.items()}
    return Preset(name, where, None if nproc is None else str(nproc), keys, of_tasks)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by dotted path. Below the section there are no further sections: a mapping there is a value."""
    sections = {path.partition(".")[0] for path, _ in all_keys() if "." in path}
    flat: dict[str, Any] = {}
    for section, value in values.items():
        if section in sections and isinstance(value, Mapping):
            flat |= {f"{section}.{key}": item for key, item in value.items()}
        else:
            flat[str(section)] = value
    return flat


def _at_most(micro_batch: Any, global_batch: int) -> Any:
    """A size of micro-batches, or sizes by epoch, at most the global batch. Other types are left to the validation."""
    if isinstance(micro_batch, Mapping):
        return {epoch: _at_most(size, global_batch) for epoch, size in micro_batch.items()}
    return min(micro_batch, global_batch) if type(micro_batch) is int else micro_batch


def _remedy(gpus: int) -> str:
    """The shipped presets that a machine with this many GPUs can run."""
    if not gpus:
        return "use --preset local, or device=cpu"
    ranks = {name: int(preset.nproc or 1) for name in _shipped() if (preset := read(name)).keys.get("device") == "cuda"}
    fitting = {name: count for name, count in ranks.items() if count <= gpus}
    most = max(fitting.values(), default=1)
    names = [name for name, count in fitting.items() if count == most] or ["local"]
    return f"use --preset {' or '.join(names)}, or --nproc {gpus}"


def _shipped() -> dict[str, Traversable]:
    files = sorted(resources.files("lockstep.presets").iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}
