"""Edits of functions by their syntax trees: a node is chosen by the names around it, and another replaces it.

An edit names a function, a node in it, and its replacement. The node is written as

    f            the name f, or an attribute f         f()        the call of f
    f(0)         the first argument of this call       f(a)       its argument a
    f:           the value that f gets by = or `for`   'f':       the value of this key of a dict
    return       the returned value                    ^f         the expression around f; ^^f the one around that

`#2/3` behind it means the second of three such nodes; without it, there is only one. In the replacement, `_` is the
node itself, and RANK and WORLD are this process's. With `before`, `after` or `statement`, the replacement consists of
statements: before or after the statement with the node, or in its place.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

Edit = tuple[str, str, str]
"""module:function of the package, a node in it, its replacement."""
_NODE = re.compile(
    r"(before |after |statement )?(?P<up>\^*)"
    r"(?:'(?P<key>\w+)':|(?P<name>\w+)(?:(?P<value>:)|\((?P<argument>\w*)\))?)(?:#(?P<number>\d+)/(?P<count>\d+))?"
)
_PLACES = {name: f"int(__import__('os').environ['{name}'])" for name in ("RANK", "WORLD_SIZE")}
_PLACES["WORLD"] = _PLACES.pop("WORLD_SIZE")


def function_of(target: str) -> FunctionType:
    """The function that an edit names."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(f"lockstep.{module}")
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    found = found.fget if isinstance(found, property) else found
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType), target
    return function


def edited_code(function: FunctionType, edits: Sequence[tuple[str, str]]) -> CodeType:
    """The code of a function after edits. Lines keep their numbers."""
    tree = _edited(function, edits)
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    flags = annotations.compiler_flag
    compiled = compile(tree, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    codes = (one for one in compiled.co_consts if isinstance(one, CodeType))
    return next(code for code in codes if code.co_name == function.__name__)


def edited_sources(edits: Sequence[Edit]) -> list[tuple[Path, str, str]]:
    """For each function that is edited: its file, its source, and its source after the edits."""
    by_function: dict[FunctionType, list[tuple[str, str]]] = {}
    for target, node, new in edits:
        by_function.setdefault(function_of(target), []).append((node, new))
    found = []
    for function, own in by_function.items():
        source = _source(function)
        indent = source[: len(source) - len(source.lstrip())]
        edited = textwrap.indent(ast.unparse(_edited(function, own)), indent) + "\n"
        found.append((Path(inspect.getfile(function)), source, edited))
    return found


@functools.cache
def _source(function: FunctionType) -> str:
    return inspect.getsource(function)


def _edited(function: FunctionType, edits: Sequence[tuple[str, str]]) -> ast.Module:
    tree = ast.parse(textwrap.dedent(_source(function)))
    chosen = [(*_find(tree, node), new) for node, new in edits]  # all before the first changes the tree
    for where, node, new in chosen:
        statements: list[Any] = ast.parse(_filled(new, node)).body
        replace = _Replace(where, node, statements if where else [statements[0].value])
        replace.visit(tree)
        assert replace.is_done, new
    return ast.fix_missing_locations(tree)


def _filled(text: str, node: ast.expr) -> str:
    """A replacement with the node itself and this process's numbers in it."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            if name.id == "_" and isinstance(name.ctx, ast.Load):
                return node
            return ast.parse(_PLACES[name.id], mode="eval").body if name.id in _PLACES else name

    return ast.unparse(Fill().visit(ast.parse(text)))


def _find(tree: ast.Module, text: str) -> tuple[str, ast.expr]:
    """Where the replacement goes, and the node that an edit names."""
    match = _NODE.fullmatch(text)
    assert match, text
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = [node for node in _in_order(tree) if isinstance(node, ast.expr) and _is_meant(node, match, parents)]
    assert len(found) == int(match["count"] or 1), f"{text} is there {len(found)} times"
    node: Any = found[int(match["number"] or 1) - 1]
    for _ in match["up"]:
        node = parents[node]
        node = parents[node] if isinstance(node, ast.keyword) else node
    return (match[1] or "").strip(), node


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        yield child
        yield from _in_order(child)


def _name(node: Any) -> str | None:
    return getattr(node, "attr", getattr(node, "id", None))


def _is_meant(node: ast.expr, match: re.Match[str], parents: dict[ast.AST, ast.AST]) -> bool:
    parent: Any = parents[node]
    name, argument = match["name"], match["argument"]
    if match["key"]:
        pairs = zip(parent.keys, parent.values, strict=True) if isinstance(parent, ast.Dict) else ()
        return any(value is node and getattr(key, "value", None) == match["key"] for key, value in pairs)
    if name == "return":
        return isinstance(parent, ast.Return)
    if match["value"]:
        targets = getattr(parent, "targets", [getattr(parent, "target", None)])
        named = {_name(one) for target in targets for one in getattr(target, "elts", [target])}
        return name in named and node in (getattr(parent, "value", None), getattr(parent, "iter", None))
    if argument == "":
        return isinstance(node, ast.Call) and _name(node.func) == name
    if argument is None:
        return _name(node) == name and isinstance(getattr(node, "ctx", None), ast.Load)
    call: Any = parents[parent] if isinstance(parent, ast.keyword) else parent
    if not isinstance(call, ast.Call) or _name(call.func) != name:
        return False
    if isinstance(parent, ast.keyword):
        return parent.arg == argument
    return node in call.args and str(call.args.index(node)) == argument


class _Replace(ast.NodeTransformer):
    """Replaces a node, or puts statements around the innermost statement with the node, or in its place."""

    def __init__(self, where: str, old: ast.expr, new: list[Any]) -> None:
        self.where, self.old, self.new, self.is_done = where, old, new, False
        for inner in (inner for one in new for inner in ast.walk(one) if hasattr(inner, "lineno")):
            ast.copy_location(inner, old)

    def visit(self, node: ast.AST) -> Any:
        if not self.where and node is self.old:
            self.is_done = True
            return self.new[0]
        is_statement = isinstance(node, ast.stmt) and self.where and self.old in ast.walk(node)
        node = self.generic_visit(node)
        if self.is_done or not is_statement:
            return node
        self.is_done = True
        return {"before": [*self.new, node], "after": [node, *self.new], "statement": self.new}[self.where]
