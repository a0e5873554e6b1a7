"""What is lost if a layer computes a buffer from its rank's batch and the wrapper overwrites the buffer."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from lockstep_audit.events import Event, EventHistory
from lockstep_audit.findings import Finding, SourceLine
from lockstep_audit.rules.facts import differ, group_of, keys, line, named, number_of, place, replicas, rule, some
from lockstep_audit.rules.sources import nodes

_ADDS = ("mul_", "add_", "sub_", "div_", "lerp_", "addcmul_", "index_add_", "index_copy_", "scatter_", "scatter_add_")
_KEEPS = ("reduce", "broadcast", "gather", "sync", "print", "log", "scalar", "save", "append", "register", "init")
"""Parts of names of functions that do not change their arguments, or change them in the same way on all ranks."""
_DECAYS = ("*", "mul", "lerp", "decay", "momentum")
_CLOSE = 1e-5
_LOOKS = 2
"""Buffers must differ before this many forward passes: a first value that each rank computes once does not count."""


def overwritten(history: EventHistory) -> list[Finding]:
    """A layer's averages that DDP overwrites with those of rank 0, so that the data of other ranks are lost."""
    known, turns = keys(history, "wrap", "model", "at"), dict[object, dict[int, dict[int, Event]]]()
    wraps = {(event["rank"], event["model"]): event for event in history.of("wrap")}
    for event in history.of("own_buffers"):
        own = event["rank"], event["model"]
        if own in wraps:
            key = known[own], group_of(history, wraps[own])
            turns.setdefault(key, {}).setdefault(event["step"], {})[event["rank"]] = event
    findings: dict[str, Finding] = {}
    for by_step in turns.values():
        first = next(iter(next(iter(by_step.values())).values()))
        apart = {name: [step for step, each in by_step.items() if _differ(each, name)] for name in first["sums"]}
        lines = {n: at for n, steps in apart.items() if len(steps) >= _LOOKS and (at := _written_at(first, n))}
        for at in sorted(lines.values()):
            names = [name for name, (file, _) in lines.items() if file == at[0]]
            step, ranks = apart[names[0]][0], tuple(by_step[apart[names[0]][0]])
            evidence = f"when the forward pass of step {step} began, {number_of(len(names), 'buffer')} differed "
            evidence += f"between {named(ranks)}: {some(names)}"
            cause = "a layer computes them from its rank's batch, and DistributedDataParallel overwrites them "
            cause += "with those of rank 0 at the next forward pass: the data of other ranks never count"
            remedy = "all_reduce the layer's sums before it updates the buffers"
            findings.setdefault(at[0], Finding("LS606", SourceLine(*at, ""), evidence, cause, remedy, ranks, step))
    return list(findings.values())


def outside(history: EventHistory) -> list[Finding]:
    """Running statistics of modules that no wrapper contains, such as those that normalize observations."""
    told = {event["rank"]: event.get("outside") or {} for event in history.of("exit")}
    for group in replicas(history):
        held = {rank: told.get(rank, {}) for rank in group}
        for key in set.intersection(*map(set, held.values())):
            first = held[group[0]][key]
            digests = {rank: each[key]["digests"] for rank, each in held.items()}
            names = [n for n in first["digests"] if differ({rank: each.get(n) for rank, each in digests.items()})]
            lines = [(file, row) for name in names for file in first["files"] for row in _averaged_at(file, name)]
            if lines:
                evidence = f"at the end, {number_of(len(names), 'buffer', 'differs', 'differ')} between "
                evidence += f"{named(group)}: {some(names)} of {key.partition(' ')[0]}"
                cause = "the module is in no wrapper, and computes its running statistics from its rank's data"
                remedy = "all_reduce the sums and the count before the module updates its buffers"
                return [Finding("LS606", SourceLine(*min(lines), ""), evidence, cause, remedy, group, None)]
    return []


@rule("LS612", "initial-statistics", "a copy of the model is evaluated with initial running statistics")
def initial_statistics(history: EventHistory) -> Iterable[Finding] | str:
    """An average of the weights whose batch normalizations have the statistics of a new layer."""
    told = [(event["rank"], copy) for event in history.of("exit") for copy in (event.get("copies") or {}).values()]
    lines: dict[str, list[tuple[int, Event]]] = {}
    for rank, copy in told:
        if copy.get("initial"):
            lines.setdefault(str(copy.get("at")), []).append((rank, copy))
    findings = []
    for events in lines.values():
        _, copy = events[0]
        made = (copy.get("made_from") or [copy.get("at")])[0]
        names, at = copy["initial"], line(copy.get("at"))
        counted = number_of(len(names), "normalization", "has", "have")
        evidence = f"in the {copy['class']} that {at} calls, {counted} a mean of 0 and a variance of 1, like a new "
        evidence += f"layer ({some(names)}); its weights have changed, and so have the trained model's statistics"
        cause = "the copy follows the parameters of the trained model, and not its buffers"
        remedy = "also copy the buffers: for a, b in zip(ema.buffers(), model.buffers()): a.copy_(b)"
        ranks = tuple(sorted({rank for rank, _ in events}))
        findings.append(Finding("LS612", place(made), evidence, cause, remedy, ranks, None))
    return findings if told else "no copy of a wrapped model was called"


def _averaged_at(file: str, name: str) -> list[int]:
    """Lines that update running statistics: not those of a counter."""
    is_known = any(word in name for word in ("mean", "var", "std", "running"))
    return [row for _, row, text in _changes(file, name) if is_known or any(word in text for word in _DECAYS)]


def _differ(events: dict[int, Event], name: str) -> bool:
    """True if a buffer of ranks differs by more than rounding."""
    told = [event["sums"][name] for event in events.values() if name in event["sums"]]
    values, norm = [each[0] for each in told], max((each[1] for each in told), default=0.0)
    return len(told) == len(events) > 1 and max(values) - min(values) > _CLOSE * norm


def _written_at(event: Event, name: str) -> tuple[str, int] | None:
    """The first line that adds something to a buffer. None: it is a counter, is recomputed, or is unknown."""
    key, kind, is_one = name.rpartition(".")[2], event["classes"][name].lower(), event["sums"][name][2] == 1
    if key.startswith("running_") or ("norm" in kind and key.endswith(("mean", "var", "std"))):
        return None  # statistics of a normalization, which training does not use
    for file in event["files"][name]:
        changes = sorted(_changes(file, key))
        if changes and not (is_one and not any(word in text for _, _, text in changes for word in _DECAYS)):
            return file, changes[0][1]
    return None


def _changes(path: str, key: str) -> Iterator[tuple[bool, int, str]]:
    """Statements of a file that compute a new `self.KEY` from the old: (by another function, line, text)."""
    assigned = [node for node in nodes(path) if isinstance(node, ast.Assign)]
    made = {t.id for n in assigned for t in n.targets if isinstance(t, ast.Name) and _uses(n.value, key, set())}
    for node in nodes(path):
        if isinstance(node, ast.AugAssign):
            is_own, is_given = _is_of(node.target, key), False
        elif isinstance(node, ast.Assign):
            targets, is_given = [target for target in node.targets if _is_of(target, key)], False
            is_part = any(isinstance(each, ast.Subscript) and _is_part(each.slice) for each in targets)
            is_own = bool(targets) and (is_part or _uses(node.value, key, made))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call, function = node.value, node.value.func
            is_method = isinstance(function, ast.Attribute) and _is_of(function.value, key)
            method = function.attr if isinstance(function, ast.Attribute) else ""
            is_copy = method == "copy_" and any(_uses(each, key, made) for each in call.args)
            is_own = is_method and (method in _ADDS or is_copy)
            is_given = not is_method and any(_is_of(each, key) for each in call.args)
            is_given = is_given and not any(word in ast.unparse(function).lower() for word in _KEEPS)
        else:
            continue
        if is_own or is_given:
            yield not is_own, node.lineno, ast.unparse(node)


def _is_of(node: ast.AST, key: str) -> bool:
    """True for `self.KEY`, and for what is taken from it, such as `self.KEY.data`, `self.KEY[rows]`, `self.KEY.t()`."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(node, ast.Attribute) and node.attr == key:
            return True
        inner = node.func if isinstance(node, ast.Call) else node.value
        node = inner.value if isinstance(node, ast.Call) and isinstance(inner, ast.Attribute) else inner
    return False


def _uses(node: ast.AST, key: str, names: set[str]) -> bool:
    """True if an expression contains one of these variables, or `self.KEY` other than as a method call."""
    inside = list(ast.walk(node))
    called = {id(each.func) for each in inside if isinstance(each, ast.Call)}
    own = any(isinstance(each, ast.Attribute) and each.attr == key and id(each) not in called for each in inside)
    return own or any(isinstance(each, ast.Name) and each.id in names for each in inside)


def _is_part(index: ast.expr) -> bool:
    """True for an index that varies: not for `[:]`, `[...]`, `[:n]`, `[0]`."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(each.lower if isinstance(each, ast.Slice) else not isinstance(each, ast.Constant) for each in parts)
