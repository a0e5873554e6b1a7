"""What the source of a script says about rows that it may reorder, and about counts that it resets."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep_audit.rules.sources import holds, name_of, nodes, own_nodes

_REORDERING = (
    "stack",
    "transpose",
    "permute",
    "swapaxes",
    "swapdims",
    "argsort",
    "lexsort",
    "sort",
    "sorted",
    "T",
    "t",
)
_RELATED = ("mT", "index_copy", "index_copy_", "scatter", "scatter_", "sort_values", "rearrange", "put_along_axis")


def strides(*events: Mapping[str, Any]) -> bool:
    """True if a function around one of these lines takes every n-th element, or what a sampler yields."""
    return any(_is_stride(node) for event in events for node in _around(event.get("at")))


def reorders(*events: Mapping[str, Any]) -> bool:
    """True if a function around one of these lines, or one that is called there, may reorder rows."""
    own = [(event["at"][0], node) for event in events if event.get("at") for node in _around(event["at"])]
    called = {(path, name_of(node)) for path, node in own if isinstance(node, ast.Call)}
    inner = [n for path, name in called for f in nodes(path) if getattr(f, "name", "") == name for n in ast.walk(f)]
    targets = [t for _, n in own if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Subscript)]
    is_put = any(isinstance(target.slice, (ast.Name, ast.Call, ast.Attribute)) for target in targets)
    taken = [each for _, node in own if isinstance(node, ast.Subscript) for each in ast.walk(node.slice)]
    is_put = is_put or any(isinstance(each, (ast.Mod, ast.FloorDiv)) for each in taken)
    return is_put or strides(*events) or any(map(_is_reordering, [*(node for _, node in own), *inner]))


def _around(at: Sequence[Any] | None) -> Iterator[ast.AST]:
    functions = [n for n in nodes(at[0]) if isinstance(n, ast.FunctionDef) and holds(n, at[1])] if at else []
    module = (n for n in (nodes(at[0]) if at else ()) if isinstance(n, ast.Module))
    scope = max(functions, key=lambda function: function.lineno) if functions else next(module, None)
    return own_nodes(scope) if scope is not None else iter(())


def _is_stride(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and name_of(node) == "list":
        return any("sampler" in name_of(each).lower() for each in node.args)
    if isinstance(node, ast.Call):
        return name_of(node) in ("range", "arange") and len(node.args) > len(("first", "end"))
    return isinstance(node, ast.Slice) and node.step is not None


def _is_reordering(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and any(isinstance(each, ast.Starred) for each in node.args):
        return name_of(node) in ("zip", "zip_longest")
    return isinstance(node, (ast.Call, ast.Attribute, ast.Name)) and name_of(node) in (*_REORDERING, *_RELATED)


def resets(at: Sequence[Any] | None) -> bool:
    """True if the file of a line sets numbers to zero in place, or the function around the line resets them."""
    for node in _around(at):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Subscript) for t in targets) or _calls_in_place(node, ("copy_", "mul_")):
            return True
    for node in nodes(at[0]) if at else ():
        value = node.value if isinstance(node, (ast.Assign, ast.AugAssign)) else None
        is_part = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
        is_times = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult)
        is_zero = isinstance(value, ast.Constant) and value.value == 0 and (is_part or is_times)
        if is_zero or _calls_in_place(node, ("zero_", "fill_")):
            return True
    return False


def _calls_in_place(node: ast.AST, names: tuple[str, ...]) -> bool:
    call = node.func if isinstance(node, ast.Call) else None
    return isinstance(call, ast.Attribute) and call.attr in names and name_of(call.value) != "grad"
