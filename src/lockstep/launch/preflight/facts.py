"""The facts that a rank knows about itself and its node, before data or model are built."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

import lockstep
from lockstep.core import devices, this_process
from lockstep.core.code_files import lockstep_folders
from lockstep.core.parallel import nodes
from lockstep.core.parallel.world import World

T = TypeVar("T")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")  # parts of a divided GPU may have the same identity
ANSWER_S = 10.0
"""A file system that does not answer for this long is a fault."""
_ENDING_S = 10.0  # ranks of an earlier start may hold memory until they have ended
LEAST_FREE = 1 << 30
"""A device with fewer free bytes cannot train: the driver's context takes half of them."""


@dataclass(frozen=True)
class Subject:
    """The training that is about to start."""

    config: Mapping[str, Any]
    """The value of each key of the config, by dotted path."""
    source: str
    """Digest of the task's code. Empty: it is unreadable, or belongs to Lockstep."""
    folder: Path
    """The run directory."""
    data: Mapping[str, str]
    """Sources of data that may be files or folders, by the key that names them."""
    stop: int | None
    """Step at which the training ends, if the config defines it."""
    fresh: bool
    """True if an earlier run in the folder will be deleted."""


@dataclass(frozen=True)
class Facts:
    """The facts that a rank knows."""

    node: str
    """The name of its node."""
    key: str
    """What it shares only with the ranks of its node."""
    process: int
    device: str
    identity: str | None
    """An identity that distinguishes its device from all others; None if ranks share a device."""
    versions: Mapping[str, str]
    config: str
    """Digest of the config."""
    source: str
    """Digest of the task's code."""
    folder: str
    """The run directory, as an absolute path."""
    data: Mapping[str, str]
    """The kind of each source of data, such as `a file of 123 bytes`; `nothing`."""
    clock: float
    """Seconds since 1970, at the same moment on all ranks up to the latency of a message."""
    memory: tuple[int, int] | None = None
    """Free bytes and all bytes of its device; None if the device shares host memory."""
    users: tuple[str, ...] = ()
    """Other processes that hold memory of its device, if requested."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Facts that could not be determined, and why."""


def digest(value: object) -> str:
    """SHA-256 of the `repr` of a value."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def of_rank(subject: Subject, world: World) -> Facts:
    """The facts of this rank. A collective: clocks are compared once all ranks have arrived here."""
    device = devices.of(world.device)
    identity = device.identity()
    visible = [f"{name}={os.environ[name]}" for name in _VISIBLE if name in os.environ]
    memory, users = memory_of(device)
    data, fault = within(lambda: {key: _kind(Path(path)) for key, path in subject.data.items()}, ANSWER_S)
    versions = {"lockstep": lockstep.__version__, "torch": torch.__version__, "python": platform.python_version()}
    libraries = device.libraries()
    versions |= {name: str(libraries[name]) for name in ("cuda", "rocm", "nccl") if libraries.get(name)}
    if spans_machines(world.size):  # which may have different code
        versions["lockstep"] += f" ({_digest_of_package()[:8]})"
    world.all_sum([0.0])
    return Facts(
        node=nodes.own_name(),
        key=nodes.own_key(),
        process=os.getpid(),
        device=str(world.device),
        identity=None if identity is None else " ".join([identity, *visible]),
        versions=versions,
        config=digest(sorted(subject.config.items())),
        source=subject.source,
        folder=os.path.abspath(subject.folder),
        data=data or {},
        clock=time.time(),
        memory=memory,
        users=tuple(users),
        extra={"data": fault} if fault else {},
    )


def spans_machines(size: int) -> bool:
    """True if some of `size` ranks are not on this machine, as far as the environment shows."""
    return this_process.local_ranks() < size


def memory_of(device: devices.Device) -> tuple[tuple[int, int] | None, list[str]]:
    """Free and all bytes of a device, and the processes that hold memory if little is free.

    Ranks of an earlier start may still be ending, so it waits a few seconds for free memory.
    """
    deadline = time.monotonic() + _ENDING_S
    while (memory := device.free_memory()) is not None and memory[0] < LEAST_FREE:
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    crowded = memory is not None and memory[0] < 0.9 * memory[1] - (1 << 30)  # a context takes half a GiB
    return memory, device.users() if crowded else []


@functools.cache
def _digest_of_package() -> str:
    """Digest of Lockstep's code: copies of a checkout have the same version, but may have different code."""
    found = hashlib.sha256()
    for package in map(Path, lockstep_folders()):
        for path in sorted(package.rglob("*.py")):
            found.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return found.hexdigest()


def _kind(path: Path) -> str:
    """The kind of a path."""
    try:
        about = path.expanduser().stat()
    except FileNotFoundError:
        return "nothing"
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: not a path at all
        return f"nothing that can be read ({getattr(error, 'strerror', None) or error})"
    if not os.access(path.expanduser(), os.R_OK):
        return "nothing that can be read (Permission denied)"
    return f"a file of {about.st_size} bytes" if stat.S_ISREG(about.st_mode) else "a folder"


def within(call: Callable[[], T], seconds: float) -> tuple[T | None, str]:
    """The value that `call` returns, and an empty text; or None and the reason why there is no answer.

    A file system whose server is gone never answers and cannot be interrupted. So the call runs in a thread.
    """
    answers: list[T] = []
    faults: list[str] = []

    def run() -> None:
        try:
            answers.append(call())
        except OSError as error:
            faults.append(f"{error.strerror or error}")

    thread = threading.Thread(target=run, name="lockstep-preflight", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return None, f"no answer within {seconds:g} s"
    return (answers[0], "") if answers else (None, faults[0] if faults else "it failed")
