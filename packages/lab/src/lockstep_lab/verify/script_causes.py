"""What in a script may make its result depend on how it is run, from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_RANK_CALLS = ("get_rank", "get_world_size", "getpid", "gethostname")
_RANDOM_MODULES = ("random", "np.random", "numpy.random", "secrets", "uuid")
_RANDOM_OF_TORCH = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal"),
    *("bernoulli", "multinomial", "Generator"),
)
_CLOCKS = ("time.time", "time.perf_counter", "time.monotonic", "time.time_ns", "datetime.now", "datetime.datetime.now")
_MOST = 3


@dataclass
class Causes:
    """Lines of a script, as `12 (os.environ['RANK'])`, by what they do."""

    script: str
    ranks: list[str] = field(default_factory=list)
    """Read which rank this is, or how many there are."""
    random: list[str] = field(default_factory=list)
    """Draw random numbers in a loop or a function."""
    clocks: list[str] = field(default_factory=list)
    """Read a clock."""
    kept: list[str] = field(default_factory=list)
    """Changes, in a loop or a function, of outside variables: state that a resumed process does not have."""

    def words(self, *names: str) -> str:
        """A sentence on the lines of some kinds; empty if there are none."""
        kinds = {
            "ranks": "the rank is read in {}",
            "random": "random numbers are drawn in {}",
            "clocks": "a clock is read in {}",
            "kept": "state outside of loop.state is changed in {}",
        }
        texts = [kinds[name].format(self._lines(getattr(self, name))) for name in names if getattr(self, name)]
        return "; ".join(texts)

    def _lines(self, found: list[str]) -> str:
        more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
        return f"{Path(self.script).name}, line {', '.join(found[:_MOST])}{more}"


def causes_in(script: str) -> Causes:
    """The causes in a script. Files that it imports are not read."""
    causes = Causes(script)
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return causes
    outside = _names_outside_of_loops(tree)
    for node, is_repeated in _walk(tree, False):
        if _reads_rank(node):
            _add(causes.ranks, node)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if is_repeated and _draws(name):
                _add(causes.random, node)
            if name in _CLOCKS:
                _add(causes.clocks, node)
        if is_repeated and _keeps_state(node, outside):
            _add(causes.kept, node)
    return causes


def _add(found: list[str], node: ast.AST) -> None:
    line = getattr(node, "lineno", 0)
    if all(not text.startswith(f"{line} ") for text in found):
        found.append(f"{line} ({' '.join(ast.unparse(node).split())[:60]})")


def _walk(node: ast.AST, is_repeated: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Each node, and whether it is in a loop or in a function."""
    for child in ast.iter_child_nodes(node):
        repeated = is_repeated or isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.Lambda)
        yield child, repeated
        yield from _walk(child, repeated)


def _reads_rank(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in ("os.getenv", "os.environ.get", "environ.get", "getenv"):
            return any(isinstance(one, ast.Constant) and one.value in _RANK_VARIABLES for one in node.args[:1])
        return called.rpartition(".")[2] in _RANK_CALLS
    if isinstance(node, ast.Subscript):
        key = node.slice
        return isinstance(key, ast.Constant) and key.value in _RANK_VARIABLES and "environ" in ast.unparse(node.value)
    return isinstance(node, ast.Attribute) and node.attr in ("rank", "ranks") and isinstance(node.ctx, ast.Load)


def _draws(name: str) -> bool:
    module, _, function = name.rpartition(".")
    return module in _RANDOM_MODULES or (module == "torch" and function in _RANDOM_OF_TORCH)


def _names_outside_of_loops(tree: ast.AST) -> set[str]:
    """Names that are set outside loops and, at the top or in a function, may live longer than a step."""
    return {
        node.id
        for node, is_repeated in _walk(tree, False)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not is_repeated
    } | {name for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}


def _keeps_state(node: ast.AST, outside: set[str]) -> bool:
    """True if a statement computes a new value of something from its old value, and it is not in `loop.state`."""
    if isinstance(node, ast.AugAssign):
        target, reads_itself = node.target, True
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]  # type: ignore[assignment]
        reads_itself = any(ast.unparse(one) == ast.unparse(target) for one in ast.walk(node.value))
    else:
        return False
    base: ast.AST = target
    while isinstance(base, ast.Attribute | ast.Subscript):
        if isinstance(base, ast.Attribute) and base.attr == "state":
            return False
        base = base.value
    return reads_itself and isinstance(base, ast.Name) and base.id in outside
