"""Lines of the user's script: which files belong to the user, and where the script currently is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from lockstep_audit.observe.code_files import LOCKSTEP, PYTHON, library_of

_CARRIERS = ("numpy", "pandas", "PIL", "matplotlib", "torchvision")  # packages that write files for their caller
_START = os.getcwd()
_OWN_NAMESPACE = 1  # of a function: CO_OPTIMIZED

USER, STANDARD, CARRIER, OTHER = "user", "standard", "carrier", "other"
_kinds: dict[str, tuple[str, str]] = {}


def declare_user(path: str) -> None:
    """Register a file as the user's, wherever it is: the script."""
    _kinds[path] = (USER, os.path.abspath(path))


def _classify(name: str) -> tuple[str, str]:
    """The kind of a code object's file, and its absolute path."""
    path = os.path.join(_START, name)
    if name.startswith("<") and (name.endswith(">") or name.startswith("<frozen ")):
        return OTHER, name
    library = library_of(path)
    if library is None:
        return USER, path
    if library == PYTHON:
        return STANDARD, path
    return (CARRIER if library in _CARRIERS else OTHER), path


def kind_of(code: CodeType) -> tuple[str, str]:
    """(kind, absolute path) of the file of a code object."""
    name = code.co_filename
    found = _kinds.get(name)
    if found is None:
        found = _kinds[name] = _classify(name)
    return found


def file_of(kind: type) -> str | None:
    """The user's file that defines a class."""
    name = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return _classify(name)[1] if name and _classify(name)[0] is USER else None


def is_of_user(function: Any) -> bool:
    """True for a function, or a callable object, that the user's code defines."""
    code = getattr(function, "__code__", None)
    return kind_of(code)[0] is USER if code else file_of(type(function)) is not None


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame of the user, of this thread or of a given stack."""
    frame = frame or sys._getframe(1)
    while frame is not None and kind_of(frame.f_code)[0] is not USER:
        frame = frame.f_back
    return frame


def here(frame: FrameType | None = None) -> list[str | int] | None:
    """`[file, line, function]` of the innermost frame of the user, of this thread or of a given stack."""
    frame = user_frame(frame or sys._getframe(1))
    return None if frame is None else [kind_of(frame.f_code)[1], frame.f_lineno, frame.f_code.co_name]


def variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a running function, or of a file. They are not kept alive."""
    if not frame.f_code.co_flags & _OWN_NAMESPACE:
        return dict(frame.f_globals)
    space = frame.f_locals
    found = dict(space)
    if sys.version_info < (3, 13) and sys.gettrace() is None:
        space.clear()  # a copy, which would live as long as the call
    return found


def arguments(frame: FrameType) -> list[Any]:
    """The arguments of a running function, in order."""
    code = frame.f_code
    found = variables(frame) if code.co_flags & _OWN_NAMESPACE else {}
    return [found.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if found]


def outside(is_inside: Callable[[FrameType], bool], count: int = 1) -> list[list[str | int]]:
    """Places of the user's innermost frames that are not inside something; of the innermost, if all are."""
    first = frame = user_frame()
    while frame is not None and is_inside(frame):
        frame = user_frame(frame.f_back) if frame.f_back is not None else None
    frame, found = frame or first, list[list[str | int]]()
    while frame is not None and len(found) < count:
        found += [at] if (at := here(frame)) else []
        frame = user_frame(frame.f_back) if frame.f_back is not None else None
    return found


def is_by_user(frame: FrameType | None) -> bool:
    """True if the user's code made a call, by itself or through a package that writes files for its caller."""
    while frame is not None:
        kind = kind_of(frame.f_code)[0]
        if kind is USER or kind is OTHER:
            return kind is USER or (library_of(frame.f_code.co_filename) == LOCKSTEP and is_by_user(frame.f_back))
        frame = frame.f_back
    return False


def is_direct(frame: FrameType | None) -> bool:
    """True if the user's code made a call of torch, and no framework did."""
    frame = _outside_torch(frame)
    return frame is not None and kind_of(frame.f_code)[0] is USER


def is_by_lockstep(frame: FrameType | None) -> bool:
    """True if Lockstep's code made a call of torch."""
    frame = _outside_torch(frame)
    return frame is not None and library_of(frame.f_code.co_filename) == LOCKSTEP


def _outside_torch(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    return frame


def is_shown(path: str) -> bool:
    """True for a file that stacks include."""
    return not path.startswith("<frozen") and library_of(path) != LOCKSTEP


def stack(frame: FrameType | None, limit: int = 40) -> Iterator[list[str | int]]:
    """The places of a stack, the innermost first."""
    while frame is not None and limit > 0:
        path = kind_of(frame.f_code)[1]
        if is_shown(path):
            yield [path, frame.f_lineno, frame.f_code.co_name]
            limit -= 1
        frame = frame.f_back
