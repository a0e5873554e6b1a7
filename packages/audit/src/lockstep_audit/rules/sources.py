"""What the source of a script says about a line that a rule has found. The source by itself yields no findings."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_UNORDERED = ("set", "frozenset", "listdir", "scandir", "glob", "iglob", "rglob", "iterdir")
_ORDERING = ("list", "tuple", "enumerate", "dict", "fromkeys", "join", "zip")
_SEEDING = ("manual_seed", "seed", "Random", "default_rng", "RandomState", "SeedSequence")
_OF_ONE_RANK = ("rank", "main", "master", "global_zero")
_EXCHANGES = ("broadcast", "reduce", "gather", "scatter")
_HARMLESS = ("requires_grad_", "detach_")
_JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "gather")
_STOPS = ("should_training_stop", "should_epoch_stop", "should_stop")
_AVERAGES = ("ema", "average", "swa", "shadow", "teacher")
_CHANGES = ("update", "step", "average", "lerp", "mul_", "add_", "copy_", "load_state_dict")


@functools.lru_cache(maxsize=64)
def nodes(path: str) -> tuple[ast.AST, ...]:
    """All nodes of a file; none if the file is missing or is not Python."""
    try:
        return tuple(ast.walk(ast.parse(Path(path).read_text(errors="replace"))))
    except (OSError, SyntaxError, ValueError):
        return ()


def name_of(node: ast.AST | None) -> str:
    """The last name of a variable, an attribute or a called function."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def holds(node: ast.AST | None, row: int) -> bool:
    """True if a line is one of those of a node."""
    return getattr(node, "lineno", 0) <= row <= (getattr(node, "end_lineno", 0) or 0)


def unordered(paths: Iterable[str | None]) -> list[tuple[str, int]]:
    """Lines that iterate over a set, or over the files of a folder, in the order in which they come."""
    found = []
    for path in dict.fromkeys(path for path in paths if path):
        members = {t.attr for n in nodes(path) for t in _made_sets(n) if isinstance(t, ast.Attribute)}
        scopes = [n for n in nodes(path) if isinstance(n, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef))]
        shared = set[str]()
        for scope in scopes:
            own = list(own_nodes(scope))
            sets = {"", *members, *shared} | {name_of(target) for node in own for target in _made_sets(node)}
            shared |= sets if isinstance(scope, ast.Module) else set()
            for node in own:
                taken = [node.iter] if isinstance(node, (ast.For, ast.comprehension)) else []
                taken = node.args if isinstance(node, ast.Call) and name_of(node) in _ORDERING else taken
                found += [(path, each.lineno) for each in taken if _is_unordered(each, sets)]
    return sorted(set(found))


def _made_sets(node: ast.AST) -> list[ast.expr]:
    """The variables and attributes that hold a set."""
    return node.targets if isinstance(node, ast.Assign) and _is_unordered(node.value, set()) else []


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of nested functions; of a file, those outside functions."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from own_nodes(child)


def outside_factories(places: Sequence[Sequence[Any]]) -> Sequence[Any] | None:
    """The first place of a stack, the innermost first, whose function does not return what the line makes."""
    return next((at for at in places if not _is_returned(at[0], at[1])), places[-1] if places else None)


def _is_returned(path: str, row: int) -> bool:
    functions = [n for n in nodes(path) if isinstance(n, ast.FunctionDef) and holds(n, row)]
    if not functions:
        return False
    inside = list(own_nodes(max(functions, key=lambda function: function.lineno)))
    names = {name_of(t) for n in inside if isinstance(n, ast.Assign) and holds(n, row) for t in n.targets} - {""}
    ends = [node for node in inside if isinstance(node, ast.Return) and node.value]
    return any(holds(end, row) or name_of(end.value) in names for end in ends)


def returns(path: str, row: int) -> list[int]:
    """Lines after a line at which the innermost function around it returns a value."""
    functions = [n for n in nodes(path) if isinstance(n, ast.FunctionDef) and holds(n, row)]
    own = own_nodes(max(functions, key=lambda function: function.lineno)) if functions else ()
    return sorted(n.lineno for n in own if isinstance(n, ast.Return) and n.value and n.lineno > row)


def _is_unordered(node: ast.AST, sets: set[str]) -> bool:
    if isinstance(node, ast.Call):
        return name_of(node) in _UNORDERED
    return isinstance(node, (ast.Set, ast.SetComp)) or name_of(node) in sets - {""}


def ways_out(path: str, inside: int, outside: int) -> list[int]:
    """Lines of `break` and `return` that leave the loops around a line, for a line after these loops."""
    loops = [n for n in nodes(path) if isinstance(n, (ast.For, ast.While)) and holds(n, inside)]
    return sorted({row for loop in loops if not holds(loop, outside) for row in _breaks(loop)})


def _breaks(node: ast.AST, is_own: bool = True) -> Iterator[int]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return) or (isinstance(child, ast.Break) and is_own):
            yield child.lineno
        elif not isinstance(child, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            yield from _breaks(child, is_own and not isinstance(child, (ast.For, ast.While)))


def cuts(path: str) -> bool:
    """True if a slice ends where a data set does, or truncates a concatenation: repeats are removed by hand."""
    for node in nodes(path):
        end = node.slice.upper if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) else None
        if end is not None and isinstance(node, ast.Subscript):
            calls = [call for call in ast.walk(end) if isinstance(call, ast.Call) and name_of(call) == "len"]
            is_joined = any(isinstance(each, ast.Call) and name_of(each) in _JOINS for each in ast.walk(node.value))
            if any("data" in name_of(each).lower() for call in calls for each in call.args):
                return True
            if is_joined and not isinstance(end, (ast.Constant, ast.UnaryOp)):
                return True
    return False


def names_around(path: str, row: int) -> str:
    """The names in the innermost function around a line, or in the outermost loop, in small letters."""
    around = [n for n in nodes(path) if holds(n, row)]
    functions = [n for n in around if isinstance(n, ast.FunctionDef)][-1:]
    loops = [n for n in around if isinstance(n, (ast.For, ast.While))][:1]
    inside = (node for scope in functions or loops for node in ast.walk(scope))
    return " ".join(name_of(node) or getattr(node, "arg", None) or "" for node in inside).lower()


def averaged_outside(path: str, row: int) -> list[int]:
    """Lines that update an average of weights in the loop around a step, outside the `if` around the step."""
    tree = nodes(path)
    loops = [n for n in tree if isinstance(n, (ast.For, ast.While)) and holds(n, row)]
    loop = max(loops, key=lambda each: each.lineno, default=None)
    tests = [n for n in ast.walk(loop) if isinstance(n, ast.If)] if loop else []
    if loop is None or not any(holds(test, row) for test in tests):
        return []
    found = [n for each in loop.body for n in ast.walk(each) if isinstance(n, ast.Call)]
    is_update = {n: any(word in name_of(n).lower() for word in ("update", "step", "ema", "average")) for n in found}
    found = [n for n in found if is_update[n] and any(w in ast.unparse(n.func).lower() for w in _AVERAGES)]
    return sorted(n.lineno for n in found if not any(holds(test, n.lineno) for test in tests))


def assigns(path: str | None, name: str) -> list[tuple[str, int]]:
    """Lines that give a variable or an attribute a value that is not empty."""
    found = [n for n in nodes(path or "") if isinstance(n, ast.Assign) and name_of(n.targets[0]) == name]
    return sorted((path or "", n.lineno) for n in found if not (isinstance(n.value, ast.Dict) and not n.value.keys))


def lowers(path: str) -> list[int]:
    """Lines that convert something to 16 bits: `.bfloat16()`, `.half()`, `.to(torch.bfloat16)`."""
    calls = [n for n in nodes(path) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    names = {n: {name_of(each) for each in [*n.args, *(k.value for k in n.keywords)]} for n in calls}
    low = {"bfloat16", "float16", "half"}
    return sorted(n.lineno for n in calls if name_of(n) in low or (name_of(n) == "to" and names[n] & low))


def divisions(path: str, first: int, last: int) -> list[tuple[int, ast.expr]]:
    """Lines from one to another that divide, and what they divide by."""
    found = [n for n in nodes(path) if isinstance(n, (ast.BinOp, ast.AugAssign)) and isinstance(n.op, ast.Div)]
    pairs = [(n.lineno, n.right if isinstance(n, ast.BinOp) else n.value) for n in found]
    return sorted((pair for pair in pairs if first <= pair[0] <= last), key=lambda pair: pair[0])


def may_be_ranks(path: str, first: int, last: int) -> bool:
    """True if a line from one to another divides by something that may be the number of ranks, or none divides."""
    found = [by for _, by in divisions(path, first, last)]
    return not found or any(not isinstance(by, ast.Constant) and "acc" not in ast.unparse(by).lower() for by in found)


def stops(path: str) -> list[int]:
    """Lines of a callback that ask a framework to stop: `control.should_training_stop = True`."""
    assigned = [node for node in nodes(path) if isinstance(node, ast.Assign)]
    assigned = [n for n in assigned if not (isinstance(n.value, ast.Constant) and not n.value.value)]
    return sorted({n.lineno for n in assigned for target in n.targets if name_of(target) in _STOPS})


def condition(path: str, before: int, after: int) -> int | None:
    """The first `if` after a line that decides whether a later line is reached."""
    found = [node for node in nodes(path) if isinstance(node, ast.If) and before < node.lineno < after]
    ways = (ast.Continue, ast.Break)
    found = [n for n in found if holds(n, after) or any(isinstance(each, ways) for each in ast.walk(n))]
    return min((node.lineno for node in found), default=None)


def changes_in_place(path: str) -> list[int]:
    """Lines of statements that change a parameter in place: `weight.add_(...)`, `p.data = ...`, `p[...] = ...`."""
    words, found = ("param", "weight", "data", "bias", "embed", "code"), set[int]()
    for node in nodes(path):
        call = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        is_change = isinstance(call, ast.Attribute) and call.attr.endswith("_") and call.attr not in _HARMLESS
        changed = [call.value] if is_change and isinstance(call, ast.Attribute) else []
        others = node.targets if isinstance(node, ast.Assign) else []
        others = [node.target] if isinstance(node, ast.AugAssign) else others
        changed += [each for each in others if not isinstance(each, ast.Name)]
        parts = {name_of(inner).lower() for each in changed for inner in ast.walk(each)} - {""}
        is_self = parts == {"p"} or any(part in words or part.endswith(("weight", "bias")) for part in parts)
        found |= {getattr(node, "lineno", 0)} if is_self and "grad" not in parts else set()
    return sorted(found)


def sets_rates(path: str) -> list[int]:
    """Lines that set the learning rate of a group of an optimizer: `group["lr"] = ...`."""
    single = [n.target for n in nodes(path) if isinstance(n, ast.AugAssign)]
    targets = [*single, *(target for n in nodes(path) if isinstance(n, ast.Assign) for target in n.targets)]
    return sorted(target.lineno for target in targets if "['lr']" in ast.unparse(target))


def sets_train(path: str) -> list[int]:
    """Lines that set a model to train mode: `model.train()`."""
    calls = [n for n in nodes(path) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    calls = [n for n in calls if name_of(n) == "train" and all(ast.unparse(each) == "True" for each in n.args)]
    return sorted(n.lineno for n in calls if "trainer" not in ast.unparse(n.func).lower())


def for_one_rank(path: str, words: Sequence[str] = _CHANGES) -> list[int]:
    """Lines of calls that change something, judging by their names, below an `if` that tests the rank."""
    branches = [node for node in nodes(path) if isinstance(node, ast.If)]
    branches = [b for b in branches if any(w in name_of(n).lower() for n in ast.walk(b.test) for w in _OF_ONE_RANK)]
    found = [each for branch in branches for each in branch.body if isinstance(each, ast.Expr)]
    return sorted(each.lineno for each in found if any(word in name_of(each.value).lower() for word in words))


def decorated_for_one_rank(path: str, row: int) -> int | None:
    """The line of a decorator such as `@rank_zero_only`, of the innermost function around a line."""
    functions = [n for n in nodes(path) if isinstance(n, ast.FunctionDef) and holds(n, row)]
    found = [n for each in functions[-1:] for n in each.decorator_list]
    return next((n.lineno for n in found if any(w in ast.unparse(n).lower() for w in _OF_ONE_RANK)), None)


def seeds(path: str, name: str) -> list[int]:
    """Lines that seed a random generator with a variable or an attribute of this name."""
    calls = [n for n in nodes(path) if isinstance(n, ast.Call) and name_of(n) in _SEEDING]
    given = {n: [inner for each in n.args for inner in ast.walk(each)] for n in calls}
    return sorted(n.lineno for n, inside in given.items() if name in map(name_of, inside))


def seeds_alike(path: str) -> int | None:
    """The first statement that seeds a generator, such as `torch.manual_seed(seed)`, with what does not name the rank.

    Functions that seed with an argument are excluded, and files in which a statement seeds by rank.
    """
    functions = {n.lineno: n for n in nodes(path) if isinstance(n, ast.FunctionDef)}
    found = [n.value for n in nodes(path) if isinstance(n, ast.Expr) and "seed" in name_of(n.value)]
    scopes = {n: functions.get(_scope(functions, n.lineno)) for n in found}
    own = {n: _arguments(scope) if scope else set() for n, scope in scopes.items()}
    found = [n for n in found if not own[n] & set(map(name_of, ast.walk(n)))]
    return min((0 if "rank" in ast.unparse(n) else n.lineno for n in found), default=0) or None


def deals(path: str, name: str) -> bool:
    """True if a file takes every n-th part of something by an attribute or a variable of this name."""
    tree = nodes(path)
    parts = [n for n in tree if isinstance(n, ast.Slice) or (isinstance(n, ast.Call) and name_of(n) == "islice")]
    compared = [n for n in tree if isinstance(n, ast.Compare) and "%" in ast.unparse(n)]
    return any(name == name_of(inner) for part in (*parts, *compared) for inner in ast.walk(part))


def set_in_prepare_data(paths: Iterable[str | None]) -> list[tuple[str, int]]:
    """Lines of Lightning's prepare_data that set what other methods read and only the constructor also sets."""
    found = []
    for path in dict.fromkeys(path for path in paths if path):
        for kind in (node for node in nodes(path) if isinstance(node, ast.ClassDef)):
            methods = {each.name: list(ast.walk(each)) for each in kind.body if isinstance(each, ast.FunctionDef)}
            prepare = methods.pop("prepare_data", [])
            others = [node for name, inside in methods.items() if name != "__init__" for node in inside]
            attributes = [node for node in others if isinstance(node, ast.Attribute)]
            read = {node.attr for node in attributes} - _stored(attributes)
            if any(name_of(base).endswith(("DataModule", "LightningModule")) for base in kind.bases):
                sets = [n for n in prepare if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
                found += [(path, n.lineno) for n in sets if name_of(n.value) == "self" and n.attr in read]
    return sorted(found)


def _stored(inside: Iterable[ast.AST]) -> set[str]:
    return {name_of(node) for node in inside if isinstance(getattr(node, "ctx", None), ast.Store)} - {""}


def _loaded(node: ast.AST) -> set[str]:
    return {name_of(each) for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Load)} - {"", "self"}


def made_on_one_rank(path: str, row: int) -> list[tuple[str, int]]:
    """Lines below an `if` without `else` that tests the rank, and that make what a later line of the function uses.

    What ranks exchange after that is excluded.
    """
    functions = [n for n in nodes(path) if isinstance(n, ast.FunctionDef) and holds(n, row)]
    scope = [*nodes(path)[:1], *sorted(functions, key=lambda function: function.lineno)][-1:]
    inside = [node for each in scope for node in own_nodes(each)]
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
    steps = sorted((n for n in inside if isinstance(n, simple)), key=lambda n: -n.lineno)
    used = {name for step in steps if holds(step, row) for name in _loaded(step)}
    for step in (step for step in steps if step.lineno < row):
        used |= _loaded(step) if _stored(ast.walk(step)) & used else set()
    found = []
    for branch in (n for n in inside if isinstance(n, ast.If) and n.lineno < row and not holds(n, row)):
        later = [n for n in inside if isinstance(n, ast.Call) and branch.lineno < n.lineno <= row]
        is_asked = any(word in name_of(n).lower() for n in ast.walk(branch.test) for word in _OF_ONE_RANK)
        if is_asked and not branch.orelse and not any(word in name_of(n) for n in later for word in _EXCHANGES):
            found += [getattr(n, "lineno", 0) for each in branch.body for n in ast.walk(each) if _stored([n]) & used]
    return [(path, line) for line in sorted(found)]


def unfreezes(path: str, wrapped: int) -> int | None:
    """The line after the wrapping of the model that sets `requires_grad` to something other than False.

    What a function does that also freezes, such as a constructor, came before, unless that function wraps. If a
    function sets its arguments, the line is that of its call. None: there is no such line, or there are several.
    """
    tree = nodes(path)
    functions = {n.lineno: n for n in tree if isinstance(n, ast.FunctionDef)}
    sets = [n for n in tree if isinstance(n, ast.Assign) and getattr(n.targets[0], "attr", "") == "requires_grad"]
    around = {n: _scope(functions, n.lineno) for n in sets}
    given = {n: functions[row] for n, row in around.items() if row and name_of(n.value) in _arguments(functions[row])}
    helpers = {function.name for function in given.values()}
    calls = [n for n in tree if isinstance(n, ast.Call) and name_of(n.func) in {*helpers, "requires_grad_"}]
    off, on, here = set[int](), dict[int, int](), _scope(functions, wrapped)
    lines: list[ast.expr | ast.stmt] = [*calls, *(n for n in sets if n not in given)]
    for node in lines:
        scope = _scope(functions, node.lineno)
        if any(isinstance(each, ast.Constant) and each.value is False for each in ast.walk(node)):
            off.add(scope)
        elif name_of(getattr(node, "func", node)) in {*helpers, ""} and (scope != here or node.lineno > wrapped):
            on[scope] = min(on.get(scope, node.lineno), node.lineno)
    found = [row for scope, row in on.items() if scope not in off or scope == here]
    return found[0] if len(found) == 1 else None


def _scope(functions: dict[int, ast.FunctionDef], row: int) -> int:
    """The first line of the innermost function around a line; 0 outside functions."""
    return max((first for first, f in functions.items() if first <= row <= (f.end_lineno or 0)), default=0)


def _arguments(function: ast.FunctionDef) -> set[str]:
    return {each.arg for each in [*function.args.args, *function.args.kwonlyargs]}
