"""Where values go in a file: through names, attributes, arguments and results of its functions. Roughly."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from lockstep_audit.rules import sources
from lockstep_audit.rules.sources import holds, name_of

_RANK = ("rank", "process_index")
_DRAWS = ("rand", "normal")
_NUMBERS = ("slice", "range", "arange", "int", "min", "max", "divmod", "tuple", "list")
_CONTAINERS = ("enumerate", "zip", "iter", "next", "dict", "sorted", "reversed", "partial", "map", "DataLoader")
_LIBRARIES = ("torch", "np", "numpy", "F", "jnp", "itertools", "islice")
_SELECTS = ("narrow", "index_select", "islice", "select", "shard", "take", "get_slice")
_SPECIAL = ("__init__", "__iter__", "__next__", "__call__", "__getitem__")
_ROUNDS = 12
Function = ast.FunctionDef | ast.AsyncFunctionDef


class ValueFlow:
    """The names, attributes and functions of a file that hold or return certain values, from the line on that gave it.

    Args:
        path: the file.
        begins: whether a node is such a value.
        passes: whether a call by this name, of this library, returns what its arguments hold.
    """

    def __init__(
        self, path: str, begins: Callable[[ast.AST], bool], passes: Callable[[str, str], bool], *, in_order: bool = True
    ) -> None:
        self._begins, self._passes, self._in_order = begins, passes, in_order
        self._held: dict[tuple[int, str], int] = {}
        """By the first line of a function, 0 outside functions, and name: the first line that gives the value."""
        self._shared: set[str] = set()
        """Attributes, and functions that return the value."""
        tree = sources.nodes(path)
        self._functions: dict[str, list[Function]] = {}
        self._classes: dict[Function, str] = {}
        self._scopes: dict[ast.AST, int] = {}
        for scope in (n for n in tree if isinstance(n, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef))):
            self._scopes |= dict.fromkeys(sources.own_nodes(scope), getattr(scope, "lineno", 0))
            if not isinstance(scope, ast.Module):
                self._functions.setdefault(scope.name, []).append(scope)
        for kind in (n for n in tree if isinstance(n, ast.ClassDef)):
            self._classes |= {n: kind.name for n in kind.body if isinstance(n, ast.FunctionDef) and n.name in _SPECIAL}
        self._by_line = {f.lineno: f for each in self._functions.values() for f in each}
        self._local = {(scope, node.arg) for node, scope in self._scopes.items() if isinstance(node, ast.arg)}
        stored = [n for n in self._scopes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self._local |= {(self._scopes[node], node.id) for node in stored}
        rounds, before = 0, -1
        while rounds < _ROUNDS and before != len(self._held) + len(self._shared):
            rounds, before = rounds + 1, len(self._held) + len(self._shared)
            for node in tree:
                self._follow(node)

    def holds(self, node: ast.AST) -> bool:
        """True if an expression contains such a value."""
        if self._begins(node):
            return True
        name = name_of(node)
        if isinstance(node, ast.Call):
            if name in self._shared or self.holds(node.func):
                return True
            library = node.func
            while isinstance(library, ast.Attribute):
                library = library.value
            given = [*node.args, *(each.value for each in node.keywords)]
            return self._passes(name, name_of(library)) and any(map(self.holds, given))
        if isinstance(node, ast.Name):
            own = scope = self._scopes.get(node, 0)
            while scope and (scope, name) not in self._local:
                scope = self._scopes.get(self._by_line[scope], 0)
            first = self._held.get((scope, name), 0)
            is_later = first <= node.lineno or scope != own or not self._in_order
            return name in self._shared or bool(first and is_later)
        if isinstance(node, ast.Attribute):
            return name in self._shared or self.holds(node.value)
        return any(map(self.holds, ast.iter_child_nodes(node)))

    def _follow(self, node: ast.AST) -> None:
        """Note where a statement or a call gives the value to."""
        for target, value in _given(node):
            if self.holds(value):
                self._give(target, getattr(node, "lineno", 1), self._scopes.get(node, 0))
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and node.value and self.holds(node.value):
            function = self._by_line.get(self._scopes.get(node, 0))
            if function:
                self._shared |= {function.name} - {*_SPECIAL} | {self._classes.get(function, "")} - {""}
        if isinstance(node, ast.Call):
            for function in self._functions.get(name_of(node), ()):
                names = [each.arg for each in [*function.args.posonlyargs, *function.args.args] if each.arg != "self"]
                given = [*zip(names, node.args, strict=False), *((k.arg or "", k.value) for k in node.keywords)]
                for name, value in given:
                    if self.holds(value):
                        self._held.setdefault((function.lineno, name), function.lineno)

    def _give(self, target: ast.AST, row: int, scope: int) -> None:
        for each in ast.walk(target):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                key = (scope, each.id)
                self._held[key] = min(row, self._held.get(key, row))
            elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                self._shared.add(each.attr)


def _given(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """The targets of a statement, and the value that each receives."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value:
        yield node.target, node.value
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        yield node.target, node.iter
    elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        yield from ((each.target, each.iter) for each in node.generators)


def _names_rank(node: ast.AST) -> bool:
    name = name_of(node) if isinstance(node, (ast.Name, ast.Attribute, ast.Call)) else ""
    return any(word in name.lower() for word in _RANK)


def takes_rows_of_rank(path: str, row: int) -> bool:
    """True if the file takes rows by the rank from what a line draws: each rank keeps its part of what all draw."""
    calls = [n for n in sources.nodes(path) if isinstance(n, ast.Call) and holds(n, row)]
    calls = [n for n in calls if any(word in name_of(n) for word in _DRAWS)]
    drawn = ValueFlow(path, lambda node: node in calls, lambda name, library: library in _LIBRARIES + _CONTAINERS)
    mine = ValueFlow(path, _names_rank, lambda name, _: name in _NUMBERS, in_order=False)
    for node in sources.nodes(path) if calls else ():
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            if mine.holds(node.slice) and drawn.holds(node.value):
                return True
        elif isinstance(node, ast.Call) and name_of(node) in _SELECTS:
            given = [*node.args, *(each.value for each in node.keywords)]
            if any(map(mine.holds, given)) and any(map(drawn.holds, [node.func, *given])):
                return True
    return False
