"""Observes dictionaries that number words or classes, in the variables of a script when training begins."""

from __future__ import annotations

import re
import zlib
from typing import Any

from lockstep_audit.observe import places
from lockstep_audit.observe.recorder import recorder

_LEAST, _MOST, _TOLD = 6, 1_000_000, 400
_NAMES = re.compile("vocab|stoi|tok|word|lexic|char|label|class|categ|2i|to_i|_ids|lookup", re.IGNORECASE)


def note(frame: Any) -> None:
    """Record the ids of the same sample of words on every rank, by the name of the variable or attribute."""
    told = dict[str, dict[str, int]]()
    at = places.here(frame)
    while frame is not None:
        if places.kind_of(frame.f_code)[0] is places.USER:
            for name, thing in (dict(frame.f_globals) | places.variables(frame)).items():
                _add(told, name, thing)
        frame = frame.f_back
    if told:
        recorder.emit("vocabulary", at=at, ids=told)


def _add(told: dict[str, dict[str, int]], name: str, thing: Any) -> None:
    """A dictionary, or those among the attributes of an object of the script."""
    if isinstance(thing, dict):
        if name not in told and _NAMES.search(name) and (found := _numbered(thing)):
            told[name] = found
    elif not isinstance(thing, type) and places.file_of(type(thing)) is not None:
        for key, each in list(getattr(thing, "__dict__", {}).items()):
            if isinstance(each, dict):
                _add(told, f"{name}.{key}", each)


def _numbered(thing: dict[Any, Any]) -> dict[str, int] | None:
    """A sample of the texts that a dictionary numbers one for one from 0 (or a few more); None: it does not."""
    size = len(thing)
    if not (_LEAST <= size <= _MOST and all(type(k) is str and type(v) is int for k, v in thing.items())):
        return None
    if len(set(thing.values())) != size or not 0 <= min(thing.values()) <= max(thing.values()) < size + _LEAST:
        return None
    chosen = sorted(thing, key=lambda word: zlib.crc32(word.encode(errors="replace")))[:_TOLD]
    return {word[:40]: thing[word] for word in chosen}
