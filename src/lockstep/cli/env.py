"""`lockstep doctor env`: what a bug report should say about a machine and what is installed on it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

import lockstep
from lockstep.cli.options import Debug
from lockstep.cli.reporting import reporting
from lockstep.core.errors import number_of

_DISTRIBUTION = "torch-lockstep"
_LIBRARIES = ["numpy", "pydantic", "typer", "torchmetrics", "tensorboard", "safetensors", "filelock", "transformers"]
_LIBRARIES += ["tokenizers", "datasets", "peft", "accelerate", "lightning", "pytorch-lightning", "optuna", "pillow"]
_EXTRAS = {
    "toy": (),
    "classification": ("images",),
    "detection": ("images",),
    "segmentation": ("images",),
    "volume_risk": ("ct",),
    "text": ("text",),
    "lm": ("text",),
}
"""What each kind of task needs, as names of extras."""
_OF_RECIPES: dict[str, tuple[str, ...]] = {"digits": ()}
"""Recipes that need less than their kind of task does."""
_BEYOND_RECIPES = ("lora", "heic", "timm", "notebook", "sweep", "lightning", "wandb", "mlflow", "trackio")
"""Extras that only some configs, commands or scripts need."""
_LIMITS = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK"}
_MEMORY_OF_GROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CPUS_OF_GROUP = "/sys/fs/cgroup/cpu.max"


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of text.")] = False,
    debug: Debug = False,
) -> None:
    """Show versions, devices, network, limits, disks, packages. Add the output to a bug report."""
    with reporting(debug):
        found = collect()
        print(json.dumps(found, indent=1) if as_json else text(found), flush=True)


def collect() -> dict[str, dict[str, Any]]:
    """The facts, by part and name. A fact that the system does not report is left out. torch need not be importable."""
    variables = _variables()  # first: importing torch and Lockstep sets some
    return {
        "versions": _versions(),
        "devices": _devices(),
        "network": _network(),
        "limits": _limits(),
        "disks": _disks(),
        "recipes": _recipes(),
        "variables": variables,
    }


def text(found: dict[str, dict[str, Any]]) -> str:
    """The facts as lines. The home folder is written as ~, which hides the user's name."""
    lines = []
    for part, facts in found.items():
        if facts:
            wide = max(map(len, facts))
            lines += [f"{part}:", *(f"  {name:<{wide}}  {value}" for name, value in facts.items())]
    home = str(Path.home())
    return "\n".join(lines).replace(home, "~") if len(home) > 1 else "\n".join(lines)


def _versions() -> dict[str, Any]:
    found = {"lockstep": f"{lockstep.__version__}, {Path(lockstep.__file__).parent}"}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["warning"] = (
            f"the distribution lockstep {metadata.version('lockstep')} is installed, too, and has a module of the same "
            "name: pip uninstall lockstep torch-lockstep; in the clone of Lockstep: pip install -e ."
        )
    found |= {"python": f"{platform.python_version()} ({platform.python_implementation()})", "torch": _of_torch()}
    found["system"] = platform.platform()
    with contextlib.suppress(OSError):
        found["distribution"] = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return found | {name: version for name in _LIBRARIES if (version := _installed(name))}


def _of_torch() -> str:
    """The version of torch, or why it cannot be imported: a library that it needs may be missing."""
    try:
        import torch
    except Exception as error:
        version = _installed("torch")
        return f"{version or 'not installed'}: cannot be imported: {type(error).__name__}: {error}"
    return f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}"


def _devices() -> dict[str, Any]:
    found = {"cpu": f"{_cpu_name()}, {number_of(os.cpu_count() or 1, 'CPU')}"}
    if hasattr(os, "sched_getaffinity"):
        found["CPUs allowed"] = str(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path(_CPUS_OF_GROUP).read_text().split()
        found |= {} if quota == "max" else {"CPUs by control group": f"{int(quota) / int(period):g}"}
    with contextlib.suppress(OSError, KeyError):
        of_host = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text()))
        free, every = (int(of_host[name]) << 10 for name in ("MemAvailable", "MemTotal"))
        found["memory"] = f"{_gib(free)} of {_gib(every)} available"
    try:
        found |= _gpus()
    except Exception as error:  # a driver that fails must not hide the other facts
        found["gpus"] = f"cannot be asked: {type(error).__name__}: {error}"
    return found


def _gpus() -> dict[str, str]:
    import torch

    from lockstep.core import devices

    found: dict[str, str] = {}
    for index in range(devices.gpus()):
        device = devices.of(torch.device("cuda", index))
        found[f"cuda:{index}"] = f"{device.name()}, {_gib(device.memory() or 0)}"
        if index == 0:
            found |= {name: str(version) for name, version in device.libraries().items() if name != "gpus"}
    found |= {"mps": "there is one"} if devices.has_mps() else {}
    return found or {"gpus": "none"}


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if named:
            return named[1].strip()
    return platform.processor() or platform.machine()


def _network() -> dict[str, Any]:
    from lockstep.launch import node_address

    host = socket.gethostname()
    found: dict[str, Any] = {"host": f"{host}: {', '.join(node_address.resolve(host)) or 'its own name is not known'}"}
    try:
        address = node_address.own_address("", [])
        found["to other nodes"] = f"{node_address.interface_of(address) or 'an interface'}, {address}"
    except lockstep.LockstepError as error:
        found["to other nodes"] = str(error)
    return found | node_address.interfaces()


def _limits() -> dict[str, Any]:
    found = {}
    for name, key in _LIMITS.items():
        limits = resource.getrlimit(getattr(resource, key))
        soft, hard = ("unlimited" if one == resource.RLIM_INFINITY else f"{one:,}" for one in limits)
        found[name] = soft if soft == hard else f"{soft} (may be raised to {hard})"
    for path in _MEMORY_OF_GROUP:
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(path).read_text())  # ValueError: max
            found |= {"memory by control group": _gib(limit)} if limit < 1 << 60 else {}
    return found | _disk("shared memory", Path("/dev/shm"))


def _disks() -> dict[str, Any]:
    from lockstep.cache_folder import cache_root

    found = _disk("working folder", Path.cwd()) | _disk("temporary files", Path(tempfile.gettempdir()))
    return found | _disk("cache", cache_root())


def _disk(name: str, path: Path) -> dict[str, str]:
    """How much room the file system of a folder has, or that of the folder in which it would be made."""
    there = next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))
    try:
        disk = shutil.disk_usage(there)
    except OSError as error:
        return {name: f"{path}: {error.strerror}"}
    writable = "" if os.access(there, os.W_OK) else ", cannot be written"
    return {name: f"{path}: {_gib(disk.free)} of {_gib(disk.total)} free, {_file_system(there)}{writable}"}


def _file_system(folder: Path) -> str:
    """The kind of file system, such as ext4 or nfs4."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: no mount has the folder
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
        inside = [mount for mount in mounts if folder.resolve().is_relative_to(mount[0])]
        return max(inside, key=lambda mount: len(mount[0]))[1]
    return "unknown file system"


def _recipes() -> dict[str, Any]:
    """By groups of recipes, and by what configs may ask for: what is missing."""
    from lockstep.configs import registry

    groups: dict[tuple[str, ...], list[str]] = {}
    for name, file in registry.recipes().items():
        groups.setdefault(needs(name, file.read_text()), []).append(name)
    return {
        **{", ".join(names): _missing_of(extras) for extras, names in groups.items()},
        **{f"[{extra}]": _missing_of((extra,)) for extra in _BEYOND_RECIPES},
    }


def needs(recipe: str, content: str) -> tuple[str, ...]:
    """The extras that a recipe needs.

    Args:
        content: its YAML text.
    """
    import yaml

    kind = yaml.safe_load(content).get("task", {}).get("kind", "")
    return _OF_RECIPES.get(recipe, _EXTRAS.get(kind, ()))


def _missing_of(extras: tuple[str, ...]) -> str:
    try:
        missing = [name for extra in ("", *extras) for name in missing_packages(extra)]
    except (metadata.PackageNotFoundError, ImportError):
        return "not known: torch-lockstep is not installed by pip"
    which = f"[{','.join(extras)}]" if extras else ""
    named = f" (in the clone of Lockstep: pip install -e '.{which}')"
    return f"missing: {', '.join(dict.fromkeys(missing))}{named}" if missing else "complete"


def missing_packages(extra: str, installed: Callable[[str], str | None] | None = None) -> list[str]:
    """The requirements of an extra that are not met, such as `pillow>=10.1`, or with the version that is there.

    Args:
        extra: empty for what every recipe requires.
        installed: gives the version of a distribution, or None.

    Raises:
        PackageNotFoundError: torch-lockstep is not installed as a distribution.
        ImportError: the library `packaging` is missing.
    """
    found = []
    for requirement in _requirements(extra):
        version = (installed or _installed)(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier}{f' ({version} is installed)' if version else ''}")
    return found


def _requirements(extra: str) -> Iterator[Any]:
    from packaging.requirements import Requirement

    for line in metadata.requires(_DISTRIBUTION) or []:
        requirement = Requirement(line)
        if (requirement.marker is None) != (extra == ""):
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == _DISTRIBUTION:
            for inner in sorted(requirement.extras):
                yield from _requirements(inner)
        else:
            yield requirement


def _installed(name: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _variables() -> dict[str, Any]:
    from lockstep.launch.preflight import variables

    return {name: value for name, value in variables.of_process().items() if value is not None}


def _gib(size: int) -> str:
    return f"{size / (1 << 30):,.1f} GiB"
