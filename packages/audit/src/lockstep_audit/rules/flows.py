"""Where values go in a file: through names, attributes, arguments and results of its functions. Roughly."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from lockstep_audit.rules import sources
from lockstep_audit.rules.sources import name_of

_DRAWS = ("randn", "rand", "randn_like", "rand_like", "randint")
_NUMBERS = ("slice", "range", "arange", "int", "min", "max", "divmod", "tuple", "list")
_CONTAINERS = ("enumerate", "zip", "iter", "next", "dict", "list", "tuple", "islice", "partial", "DataLoader")
_LIBRARIES = ("torch", "np", "numpy", "F", "itertools")
_SELECTS = ("narrow", "index_select", "islice", "select", "shard", "take")
_ROUNDS = 6
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class ValueFlow:
    """The names, attributes and functions of a file that hold or return certain values.

    Args:
        path: the file.
        begins: whether a node is such a value.
        passes: whether a call by this name, of this library, returns what its arguments hold.
        in_order: whether a name holds the value only from the line on that gives it.
    """

    def __init__(
        self, path: str, begins: Callable[[ast.AST], bool], passes: Callable[[str, str], bool], *, in_order: bool = True
    ) -> None:
        self._begins, self._passes, self._in_order = begins, passes, in_order
        self._held: dict[tuple[ast.AST | None, str], int] = {}
        """By function and name, the first line that gives the value."""
        self._shared: set[str] = set()
        """Attributes, and functions that return the value."""
        tree = sources.nodes(path)
        scopes = [each for each in tree if isinstance(each, (ast.Module, *_FUNCTIONS))]
        self._functions = [each for each in scopes if isinstance(each, _FUNCTIONS)]
        self._scopes = {node: scope for scope in scopes for node in sources.own_nodes(scope)}
        stored = [n for n in self._scopes if isinstance(n, ast.arg) or isinstance(getattr(n, "ctx", None), ast.Store)]
        self._local = {(self._scopes[node], getattr(node, "arg", name_of(node))) for node in stored}
        for _ in range(_ROUNDS):
            for node in tree:
                self._follow(node)

    def holds(self, node: ast.AST) -> bool:
        """True if an expression contains such a value."""
        if self._begins(node) or name_of(node) in self._shared:
            return True
        if isinstance(node, ast.Call):
            library = node.func
            while isinstance(library, ast.Attribute):
                library = library.value
            is_through = self._passes(name_of(node), name_of(library))
            return any(map(self.holds, _parts(node) if is_through else [node.func]))
        if isinstance(node, ast.Name):
            own = scope = self._scopes.get(node)
            while scope in self._scopes and (scope, node.id) not in self._local:
                scope = self._scopes[scope]
            first = self._held.get((scope, node.id), 0)
            return first > 0 and (first <= node.lineno or scope is not own or not self._in_order)
        return any(map(self.holds, ast.iter_child_nodes(node)))

    def _follow(self, node: Any) -> None:
        """Note where a statement or a call gives the value to."""
        scope = self._scopes.get(node)
        for given, value in _given(node):
            if self.holds(value):
                for each in (n for n in ast.walk(given) if isinstance(getattr(n, "ctx", None), ast.Store)):
                    self._shared |= {each.attr} if isinstance(each, ast.Attribute) else set()
                    row = self._held.get((scope, name_of(each)), node.lineno)
                    self._held[scope, name_of(each)] = min(row, node.lineno)
        if isinstance(node, (ast.Return, ast.Yield)) and node.value and self.holds(node.value):
            self._shared |= {getattr(scope, "name", "")} - {"", "__init__", "__call__", "__iter__", "__next__"}
        for function in self._functions if isinstance(node, ast.Call) else ():
            if function.name == name_of(node):
                names = [each.arg for each in function.args.args if each.arg != "self"]
                pairs = [*zip(names, node.args, strict=False), *((str(k.arg), k.value) for k in node.keywords)]
                self._held |= {(function, name): function.lineno for name, value in pairs if self.holds(value)}


def _parts(call: ast.Call) -> list[ast.expr]:
    return [call.func, *call.args, *(each.value for each in call.keywords)]


def _given(node: Any) -> list[tuple[ast.AST, ast.AST]]:
    """The targets of a statement, and the value that each receives."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.NamedExpr)):
        return [(each, node.value) for each in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
    return [(each.target, each.iter) for each in loops]


def _names_rank(node: ast.AST) -> bool:
    return any(word in name_of(node).lower() for word in ("rank", "process_index"))


def takes_rows_of_rank(path: str, row: int) -> bool:
    """True if the file takes rows by the rank from what a line draws: each rank keeps its part of what all draw."""
    tree = sources.nodes(path)
    calls = [n for n in tree if isinstance(n, ast.Call) and sources.holds(n, row) and name_of(n) in _DRAWS]
    drawn = ValueFlow(path, lambda node: node in calls, lambda name, of: of in _LIBRARIES or name in _CONTAINERS)
    mine = ValueFlow(path, _names_rank, lambda name, _: name in _NUMBERS, in_order=False)
    for node in tree if calls else ():
        whole, part = ([node.value], [node.slice]) if isinstance(node, ast.Subscript) else ([], [])
        if isinstance(node, ast.Call) and name_of(node) in _SELECTS:
            whole = part = _parts(node)
        if any(map(mine.holds, part)) and any(map(drawn.holds, whole)):
            return True
    return False
