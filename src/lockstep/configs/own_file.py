"""A user's Python file as text: what it defines. The file is not run. Importing this module loads no torch."""

from __future__ import annotations

import ast
from pathlib import Path

from lockstep.core.errors import UsageError, did_you_mean

_LOOP = (
    "`lockstep init --from plain` shows how a training loop uses lockstep.Loop, and `lockstep run --nproc 2 {path}` "
    "starts it"
)


_OTHER_TASK = (
    "`lockstep run --nproc 2 {path}` starts it, and `lockstep verify {path}` checks it. This command needs a task: "
    "FILE.py:Task"
)


def is_loop_script(target: str) -> bool:
    """True if `target` is a file, without the name of a task, that uses `lockstep.Loop` and defines no task."""
    if not target.endswith(".py") or not Path(target).is_file():
        return False
    tree = _tree(target)
    return _has_loop(tree) and not _tasks(tree)


def check_target(path: str, name: str) -> None:
    """Check that a file may have the task that `path:name` names, before it is run.

    Args:
        name: empty if no name was given.

    Raises:
        UsageError: no name was given, or the file assigns a value to the name and defines neither a class nor a
            function of it. Names the classes of the file, or says how a script with a training loop is started.
    """
    tree = _tree(path)
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    tasks = _tasks(tree)
    has_loop = not tasks and any(_is_backward(node) for node in ast.walk(tree))
    if not name:
        remedy = f"write {path}:{tasks[0] if tasks else 'MyTask'}"
        if not tasks and _has_loop(tree):
            remedy = _OTHER_TASK.format(path=path)
            raise UsageError("it is a script with a lockstep.Loop, and no task", where=path, remedy=remedy)
        if has_loop:
            raise UsageError("it is a script with its own training loop", where=path, remedy=_LOOP.format(path=path))
        raise UsageError("no class is named", where=path, remedy=remedy)
    if name in assigned and name not in defined and not _may_make_tasks(tree):
        remedy = _LOOP.format(path=path) if has_loop else f"{did_you_mean(name, tasks)}name a class: {path}:MyTask"
        raise UsageError(f"{name} is a variable, and not a class of a task", where=path, remedy=remedy)


def _tree(path: str) -> ast.Module:
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):  # whoever runs the file reports it
        return ast.Module([], [])


def _tasks(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and _is_task(node)]


def _has_loop(tree: ast.Module) -> bool:
    """True if the file names `lockstep.Loop`, or imports `Loop` from lockstep."""
    modules = {"lockstep"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {name.asname for name in node.names if name.name == "lockstep" and name.asname}
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lockstep":
            modules |= {"lockstep.Loop" for name in node.names if name.name == "Loop"}
    named = {
        ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "Loop"
    }
    return "lockstep.Loop" in modules or bool(named & modules)


def _is_task(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2].endswith("Task") for base in node.bases)


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"


def _may_make_tasks(tree: ast.Module) -> bool:
    """True if the file uses the adapters, which make a task of a variable."""
    return "adapters" in ast.unparse(tree) or "Trainer" in ast.unparse(tree)
