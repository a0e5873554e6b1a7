"""Observes what the script saves, opens for writing and loads, and the states that it restores."""

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep_audit.observe import calls, digests, models, places
from lockstep_audit.observe.objects import Numbers, Registry
from lockstep_audit.observe.recorder import After, recorder

_EACH_LINE = 50
_KEYS = 30
_STEPS = ("step", "global_step", "steps", "epoch", "iteration", "iter")
_ROWS, _LARGEST, _MOST = (".csv", ".tsv", ".txt", ".jsonl", ".ndjson"), 5_000_000, 200
_depth = 0
_texts: dict[str, str] = {}
"""Files of rows that the script wrote, and their current names."""
_numbers = {what: Numbers() for what in ("model", "optimizer", "scheduler", "scaler")}


def saved(how: str, value: Any, to: Any = None, *_: Any, **named: Any) -> After:
    """torch.save, safetensors' save_file, and DCP's save."""
    global _depth
    to = next((named[name] for name in ("f", "filename", "checkpoint_id") if name in named), to)
    _depth += 1
    at = places.here()
    if _depth == 1 and (path := _path(to)):
        shards = recorder.guard("shards in files", lambda: list(_shards(value))) if how != "dcp" else None
        parts = {"shards": shards[:_KEYS]} if shards else {}
        recorder.emit("save", limit=_EACH_LINE, at=at, path=path, keys=_keys(value), how=how, **parts)

    def after(result: Any, error: BaseException | None) -> None:
        global _depth
        _depth -= 1

    return after


def loaded(how: str, source: Any = None, *_: Any, **named: Any) -> After:
    """torch.load, and safetensors' load_file."""
    source = next((named[name] for name in ("f", "filename") if name in named), source)
    at, path = places.here(), _path(source)

    def after(result: Any, error: BaseException | None) -> None:
        if error is None and path:
            keys = _keys(result)
            step = {name: result[name] for name in _STEPS if name in (keys or ()) and isinstance(result[name], int)}
            recorder.emit("load", limit=_EACH_LINE, at=at, path=path, keys=keys, saved_step=step or None, how=how)

    return after


_reads = [0, 0]
"""DCP's loads that have begun, and those that have ended."""


def loaded_in_place(state: Any, *_: Any, **named: Any) -> After:
    """DCP's load, which writes into the tensors of a state that was taken before."""
    if path := _path(named.get("checkpoint_id")):
        recorder.emit("load", limit=_EACH_LINE, at=places.here(), path=path, keys=_keys(state), how="dcp")
    _reads[0] += 1
    return lambda result, error: _reads.__setitem__(1, _reads[1] + 1)


def renamed(old: Any, new: Any, *_: Any, **__: Any) -> After:
    """os.rename, os.replace and copies: a file gets a different name."""
    if (before := _path(old)) and (now := _path(new)) and not _is_special(before):
        recorder.emit("rename", limit=_EACH_LINE, at=places.here(), path=before, to=now)
        _texts.update({path: now for path, name in _texts.items() if name == before})
    return None


def _shards(value: Any, depth: int = 5) -> Iterator[str]:
    """The names of tensors in a checkpoint that are shards: DTensors, or taken out of DTensors."""
    for name, one in value.items() if isinstance(value, Mapping) and depth else ():
        if isinstance(one, torch.Tensor):
            parts = getattr(one, "placements", ())
            if any(placement.is_shard() for placement in parts) or (not parts and models.is_shard_of(str(name), one)):
                yield str(name)
        else:
            yield from _shards(one, depth - 1)


def _path(to: Any) -> str | None:
    """The absolute path of a path or of an open file."""
    to = getattr(to, "name", to) if not isinstance(to, os.PathLike) else os.fspath(to)
    to = os.fsdecode(to) if isinstance(to, bytes) else to
    return os.path.abspath(to) if isinstance(to, str) else None


def _keys(value: Any) -> list[str] | None:
    return [str(key) for key in list(value)[:_KEYS]] if isinstance(value, Mapping) else None


_taken: Registry[tuple[list[str | int] | None, tuple[int, int], int]] = Registry()
"""By the first tensor of a state_dict(): where it was taken, the steps and loads before it, and those of DCP."""
_loads: Registry[int] = Registry()
"""By the first parameter of a module: how often other tensors were loaded into it."""


def taken(module: Any, *arguments: Any, **named: Any) -> After:
    """Module.state_dict of a whole module."""
    first = None if arguments or "destination" in named else next(module.parameters(), None)
    if first is None:
        return None
    known = (places.here(), (recorder.counts.optimizer_steps, _loads.get(first) or 0), _reads[0])

    def after(result: Any, error: BaseException | None) -> None:
        tensor = next(digests.tensors_in(result, 1), None)
        if tensor is not None:
            _taken.put(tensor, known)

    return after


def _taken_at(module: Any, state: Any = None) -> list[Any] | None:
    """Where a state was taken that shares the memory of the module, and how many steps have changed it since."""
    parameters = dict(module.named_parameters())
    given = [each for each in state.values() if isinstance(each, torch.Tensor)] if isinstance(state, Mapping) else []
    known = next((known for each in given if (known := _taken.get(each))), None)
    if not parameters or not given:
        return None
    first, memory = next(iter(parameters.values())), {digests.local(each).data_ptr() for each in given} - {0}
    loads, steps = _loads.get(first) or 0, recorder.counts.optimizer_steps
    if not all(name in state and digests.local(each).data_ptr() in memory for name, each in parameters.items()):
        _loads.put(first, loads + 1)
        return None
    if known is None or known[1] == (steps, loads) or not known[2] == _reads[0] == _reads[1]:  # DCP has filled it
        return None
    return [known[0], steps - known[1][0]]


def restored(what: str, thing: Any, *arguments: Any, **named: Any) -> After:
    """load_state_dict of a model, an optimizer, a scheduler or a scaler."""
    told = {"at": places.here(), "what": what, "id": _numbers[what].of(thing)}
    if what == "model":
        told["names_digest"] = digests.of_numbers(dict(thing.named_parameters()))
        told["model"] = recorder.guard("weights before a load", calls.restores, thing)
        state = named.get("state_dict", next(iter(arguments), None))
        told["taken"] = recorder.guard("a state that was not copied", _taken_at, thing, state)

    def after(result: Any, error: BaseException | None) -> None:
        keys = {name: list(getattr(result, f"{name}_keys", ())) for name in ("missing", "unexpected")}
        shown = {name: names[:_KEYS] for name, names in keys.items() if names}
        of = len(thing.state_dict()) if shown else None
        if error is None:
            recorder.emit("state", limit=_EACH_LINE, of=of, **told, **shown)

    return after


def watch_open() -> None:
    """Observe `open` by the script, or by a package that writes for the script, such as NumPy.

    `sys.addaudithook` would work too, but it is called at each call of `id`, which slows down all steps.
    """
    original = builtins.open

    def observed(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if isinstance(mode, str):
            recorder.guard("open", _opened, file, mode, sys._getframe(1))
        return original(file, mode, *arguments, **named)

    observed.__name__, observed.__doc__, observed.__module__ = "open", original.__doc__, "_io"
    builtins.open = observed
    io.open = observed


def _opened(file: Any, mode: str, caller: Any) -> None:
    if not isinstance(file, (str, bytes, os.PathLike)) or not places.is_by_user(caller):
        return
    path = _path(file)
    if path and not _is_special(path):
        kind = "read" if mode.startswith("r") and "+" not in mode else "save"
        recorder.emit(kind, limit=_EACH_LINE, at=places.here(caller), path=path, how="open", mode=mode)
        if mode.strip("t") == "w" and path.endswith(_ROWS) and len(_texts) < _MOST:
            _texts[path] = path


def at_exit() -> dict[str, Any]:
    """The number of lines in each file of rows."""
    for path, name in _texts.items():
        if os.path.isfile(name) and os.path.getsize(name) <= _LARGEST:
            content = Path(name).read_bytes()
            recorder.emit("text", path=path, lines=content.count(b"\n") + (content[-1:] not in (b"\n", b"")))
    return {}


def _is_special(path: str) -> bool:
    """True for paths of devices and of the kernel. /dev/shm holds ordinary files."""
    return path.startswith(("/dev/", "/proc/")) and not path.startswith("/dev/shm/")
