"""Names in the user's code what no seed reaches, and what differs by process or machine: for errors about samples."""

from __future__ import annotations

import dis
import os
import random
from collections.abc import Iterator
from types import CodeType, FunctionType

from lockstep.core.code_files import is_own_code
from lockstep.core.data.private_generators import codes_of, walk
from lockstep.core.data.reachable import text_of

_SHOWN = 3
_ENTROPY = "draws from the system: take a number from the global generators"
_CLOCK = "depends on the time"
_FILES = "gives files in an order that differs by machine: sort them"
_CAUSES = {
    **dict.fromkeys(("SystemRandom", "urandom", "uuid1", "uuid4", "token_bytes", "token_hex", "randbelow"), _ENTROPY),
    **dict.fromkeys(
        ("default_rng", "RandomState", "SeedSequence"),
        "makes a new generator, which is not seeded: make it in __init__",
    ),
    **dict.fromkeys(("time", "time_ns", "perf_counter", "monotonic", "now", "today", "utcnow"), _CLOCK),
    **dict.fromkeys(("listdir", "scandir", "glob", "iglob", "rglob", "iterdir", "walk"), _FILES),
    **dict.fromkeys(("getpid", "gethostname", "get_ident", "get_worker_info"), "differs by process"),
    **dict.fromkeys(("environ", "getenv"), "differs by rank: RANK is not the same in two processes"),
    "hash": "differs by process for texts, unless PYTHONHASHSEED is set",
    "id": "is an address, which differs by process",
}
_SETS = "a set: the order of texts in it differs by process, unless PYTHONHASHSEED is set: sort it"
_NAMES = _CAUSES.keys() - {"hash", "id"}  # of attributes
_LOADS = ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_NAME", "IMPORT_FROM")


def causes(**owners: object) -> str:
    """A sentence that names lines of the user's code that may be at fault. Empty: there are none.

    Args:
        owners: what makes the samples, such as the data set and the task.
    """
    seen: set[int] = set()
    found: dict[str, None] = {}
    for name, owner in owners.items():
        for place, value in walk(owner, name, seen):
            if isinstance(value, random.SystemRandom):
                found[f"{text_of(place)}, which {_ENTROPY}"] = None
            elif isinstance(value, FunctionType) and is_own_code(value.__code__.co_filename):
                found |= dict.fromkeys(text for code in codes_of(value.__code__) for text in _in_code(code))
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"Look at {'; '.join(list(found)[:_SHOWN])}{more}" if found else ""


def _in_code(code: CodeType) -> Iterator[str]:
    line = code.co_firstlineno
    for one in dis.get_instructions(code):
        line = (one.positions.lineno if one.positions else None) or line
        place = f"{os.path.basename(code.co_filename)}:{line}"
        if one.opname in ("BUILD_SET", "SET_ADD") or (one.opname == "LOAD_GLOBAL" and one.argval == "set"):
            yield f"{place}, {_SETS}"
        elif one.opname in _LOADS and one.argval in (_CAUSES if one.opname == "LOAD_GLOBAL" else _NAMES):
            yield f"{place}, `{one.argval}` {_CAUSES[one.argval]}"
