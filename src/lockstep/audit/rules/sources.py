"""What the text of a script says of a line that a rule has found: nothing is found by the text alone."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

_UNORDERED = ("set", "frozenset", "listdir", "scandir", "glob", "iglob", "rglob", "iterdir")
_ORDERING = ("list", "tuple", "enumerate", "dict", "fromkeys", "join", "zip")
_OF_ONE_RANK = ("rank", "main", "master")
_CHANGES = ("update", "step", "average", "lerp", "mul_", "add_", "copy_", "load_state_dict")


@functools.lru_cache(maxsize=64)
def nodes(path: str) -> tuple[ast.AST, ...]:
    """All nodes of a file; none if the file is not there or is no Python."""
    try:
        return tuple(ast.walk(ast.parse(Path(path).read_text(errors="replace"))))
    except (OSError, SyntaxError, ValueError):
        return ()


def _name(node: ast.AST | None) -> str:
    """The last name of a variable, an attribute or a called function."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _holds(node: ast.AST, row: int) -> bool:
    return getattr(node, "lineno", 0) <= row <= (getattr(node, "end_lineno", 0) or 0)


def unordered(paths: Iterable[str | None]) -> list[tuple[str, int]]:
    """Lines that take the elements of a set, or the files of a folder, in the order in which they come."""
    found = []
    for path in dict.fromkeys(path for path in paths if path):
        sets = {""}
        for node in nodes(path):
            if isinstance(node, ast.Assign) and _is_unordered(node.value, sets):
                sets |= {_name(target) for target in node.targets}
        for node in nodes(path):
            taken = [node.iter] if isinstance(node, (ast.For, ast.comprehension)) else []
            taken = node.args if isinstance(node, ast.Call) and _name(node) in _ORDERING else taken
            found += [(path, each.lineno) for each in taken if _is_unordered(each, sets)]
    return sorted(set(found))


def _is_unordered(node: ast.AST, sets: set[str]) -> bool:
    if isinstance(node, ast.Call):
        return _name(node) in _UNORDERED
    return isinstance(node, (ast.Set, ast.SetComp)) or _name(node) in sets - {""}


def ways_out(path: str, inside: int, outside: int) -> list[int]:
    """Lines of `break` and `return` that lead out of the loops around a line, to a line behind these loops."""
    loops = [n for n in nodes(path) if isinstance(n, (ast.For, ast.While)) and _holds(n, inside)]
    return sorted({row for loop in loops if not _holds(loop, outside) for row in _breaks(loop)})


def _breaks(node: ast.AST, is_own: bool = True) -> Iterator[int]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return) or (isinstance(child, ast.Break) and is_own):
            yield child.lineno
        elif not isinstance(child, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _breaks(child, is_own and not isinstance(child, (ast.For, ast.While)))


def cuts(path: str) -> bool:
    """True if a slice ends where a data set does: repeated samples are cut off by hand."""
    ends = [n.slice.upper for n in nodes(path) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Slice)]
    calls = [call for end in ends if end for call in ast.walk(end) if isinstance(call, ast.Call)]
    return any(_name(call) == "len" and "data" in _name(each).lower() for call in calls for each in call.args)


def condition(path: str, before: int, after: int) -> int | None:
    """The first `if` behind a line that decides whether a later line is reached."""
    found = [
        node.lineno
        for node in nodes(path)
        if isinstance(node, ast.If)
        and before < node.lineno < after
        and (_holds(node, after) or any(isinstance(each, (ast.Continue, ast.Break)) for each in ast.walk(node)))
    ]
    return min(found, default=None)


def for_one_rank(path: str) -> list[int]:
    """Lines of calls that change something, below an `if` that asks for the rank."""
    return sorted(
        each.lineno
        for node in nodes(path)
        if isinstance(node, ast.If) and any(w in _name(n).lower() for n in ast.walk(node.test) for w in _OF_ONE_RANK)
        for each in node.body
        if isinstance(each, ast.Expr) and any(word in _name(each.value).lower() for word in _CHANGES)
    )
