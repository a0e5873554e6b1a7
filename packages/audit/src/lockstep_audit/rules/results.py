"""The rule on results of collectives that a script throws away."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from lockstep_audit.events import EventHistory
from lockstep_audit.findings import Finding, SourceLine
from lockstep_audit.rules import sources
from lockstep_audit.rules.divergence import compared_steps
from lockstep_audit.rules.facts import line, place, rule, steps

_IN_PLACE = ("broadcast_object_list", "broadcast", "all_reduce")
_RETURNED = ("reduce", "gather", "gather_for_metrics", "all_gather")
"""Methods of Accelerate and Fabric, which return their result."""
_NEW = ("tensor", "clone", "stack", "cat")
"""Functions whose result shares no memory with their arguments."""


@rule("LS507", "result-unused", "the result of a collective is thrown away")
def result_unused(history: EventHistory) -> Iterable[Finding] | str:
    """An in-place exchange of a copy or a new list that nothing reads afterwards."""
    calls = [event for event in history.of("collective") if event.get("at")]  # the source of a broadcast has its value
    calls = [e for e in calls if not str(e.get("op")).startswith("broadcast") or e["rank"] != (e.get("root") or 0)]
    told = {tuple(event["at"][:2]): event for event in calls}
    findings, ranks = [], tuple(history.ranks)
    for path in {path for path, _ in told}:
        for call, name in _unused(path):
            rows = range(call.lineno, (call.end_lineno or 0) + 1)
            event = next((told[path, row] for row in rows if (path, row) in told), None)
            if event:
                at = SourceLine(path, call.lineno, event["at"][2])
                evidence = f"{line(at)} exchanges {name}, which nothing reads afterwards"
                cause = "the collective writes its result there, and later lines use what each rank had before"
                if sources.name_of(call) in _RETURNED:
                    cause = "the function returns its result and leaves its argument as it was"
                remedy = "read the result: box = [order]; dist.broadcast_object_list(box); order = box[0]"
                findings.append(Finding("LS507", at, evidence, cause, remedy, ranks, event["step"]))
    findings += _copies(history)
    return findings if findings or any(history.of("collective")) else "no collective was seen in Python"


def _copies(history: EventHistory) -> list[Finding]:
    """Copies of gradients whose sum over ranks does not come back to the gradients."""
    told = {(event["rank"], event["step"]): event for event in history.of("copy_reduce")}
    for by_rank in steps(history).values() if told and not any(history.of("hand_average")) else ():
        ranks = tuple(by_rank)
        for each in compared_steps(by_rank, ranks, set()) if len(ranks) > 1 else ():
            events = [told.get((rank, each.events[rank]["step"])) for rank in ranks]
            first = events[0]
            if each.gradients and first is not None and all(events):
                cause = "the sum is in a copy, such as one of 16 bits, and the optimizer uses each rank's own gradients"
                remedy = "write it back after the sum: parameter.grad.copy_(total)"
                evidence = f"{line(first.get('at'))} sums copies of gradients over ranks, and at step {first['step']} "
                evidence += f"{len(each.gradients)} of {each.of} gradients still differ"
                return [Finding("LS507", place(first.get("at")), evidence, cause, remedy, ranks, first["step"])]
    return []


def _unused(path: str) -> Iterator[tuple[ast.Call, str]]:
    """Calls of a file whose statement drops what they exchange, and the text of what they exchange."""
    for scope in (n for n in sources.nodes(path) if isinstance(n, (ast.Module, ast.FunctionDef))):
        inside = list(sources.own_nodes(scope))
        for call in (n.value for n in inside if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)):
            name, is_sync = sources.name_of(call), not any(each.arg == "async_op" for each in call.keywords)
            owner = sources.name_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            is_lost = name in _RETURNED and owner in ("accelerator", "fabric")
            if call.args and is_sync and (is_lost or (name in _IN_PLACE and _is_dropped(scope, inside, call))):
                yield call, ast.unparse(call.args[0])


def _is_dropped(scope: ast.AST, inside: list[ast.AST], call: ast.Call) -> bool:
    """True for a new object with a value of the script that has no name, or whose name nothing else reads.

    Later lines must read that value: otherwise nothing is lost.
    """
    changed = {id(n.target) for n in inside if isinstance(n, ast.AugAssign)}
    reads = [n for n in ast.walk(scope) if isinstance(n, ast.Name)]
    reads = [n for n in reads if isinstance(n.ctx, ast.Load) or id(n) in changed]
    given, values = call.args[0], call.args[:1]
    if isinstance(given, ast.Name):
        assigned = [n for n in inside if isinstance(n, ast.Assign)]
        values = [n.value for n in assigned if sources.name_of(n.targets[0]) == given.id]
        shared = [n for n in ast.walk(scope) if isinstance(n, (ast.Global, ast.Nonlocal)) and given.id in n.names]
        if shared or sum(n.id == given.id for n in reads) != 1:
            return False
    names = {n.id for value in values if _is_new(value) for n in ast.walk(value) if isinstance(n, ast.Name)} - {"torch"}
    later = {n.id for n in reads if n.lineno > (call.end_lineno or 0)}
    return bool(values) and all(map(_is_new, values)) and bool(names & later)


def _is_new(value: ast.expr) -> bool:
    if isinstance(value, ast.List):
        return any(isinstance(each, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) for each in value.elts)
    if not isinstance(value, ast.Call) or sources.name_of(value) not in _NEW:
        return False
    parts = [value.func.value] if isinstance(value.func, ast.Attribute) and sources.name_of(value) == "clone" else []
    names = [n for part in [*parts, *value.args] for n in ast.walk(part) if isinstance(n, (ast.Name, ast.Attribute))]
    return bool(names)
