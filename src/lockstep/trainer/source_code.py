"""The source code of a user's task: its parts, and the differences from the parts that a run has kept.

A part is a Python file, named by its path below the task's folder. If the task is given as an object, a part is a class
or function, named by its qualified name. Comments, docstrings and layout do not count as differences.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core import atomic
from lockstep.core.code_files import PACKAGES, is_own_code
from lockstep.core.plugins import package_of

Parts = dict[str, str]  # from the name of a part to its text
Units = dict[str, tuple[str, int]]  # from the name of a function to its code and first line; see `_units`

_known: dict[type, Parts] = {}
_SHOWN = 60  # characters of a line
_GIT_S = 2.0


def of_task(task: object, kind: object = None, kept: Mapping[str, str] | None = None) -> Parts:
    """The parts of a task. Empty for a shipped task, and if nothing of the task can be read.

    Args:
        kind: `FILE.py:Class`, if the config names a file. If the task is of this class, its parts are files.
        kept: parts that a run has kept. If they are files, no other files are searched: a file that imports another
            file has changed itself.
    """
    if type(task) in _known:
        return _known[type(task)]
    path, _, name = kind.rpartition(":") if isinstance(kind, str) else ("", "", "")
    file = getattr(sys.modules.get(type(task).__module__), "__file__", None)
    is_named = path.endswith(".py") and file is not None and type(task).__name__ == name
    try:
        if not is_named or Path(str(file)).resolve() != Path(path).resolve():
            return of_class(type(task))
        if kept and all(name.endswith(".py") for name in kept):
            return now(Path(path).resolve(), kept)
        return of_file(Path(path).resolve())
    except Exception:  # a task that Python can run must train, even if its source cannot be read
        return {}


def of_choice(task: object | None, kind: object) -> Parts:
    """The parts of a task, or of the task that a config names. Empty for a shipped task, and if nothing can be read."""
    if task is not None:
        return of_task(task, kind)
    path, _, _ = kind.rpartition(":") if isinstance(kind, str) else ("", "", "")
    try:
        return of_file(Path(path).resolve()) if path.endswith(".py") else {}
    except Exception:  # the task says what is wrong with its file
        return {}


def know(kind: type, parts: Parts) -> None:
    """From now on, these are the parts of tasks of a class that came from another process, which read its source."""
    _known[kind] = parts


def read(folder: Path) -> Parts:
    """The parts that `write` has written into `folder`."""
    return {
        str(path.relative_to(folder)): _read(path) or ""
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"  # Python keeps compiled modules where it imports from
    }


def write(folder: Path, parts: Mapping[str, str]) -> None:
    """Write these parts into `folder`, instead of all that it holds."""
    if not parts:
        atomic.remove(folder)
        return
    with atomic.staged_folder(folder, replace=True) as staging:
        for name, text in parts.items():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_text(text, encoding="utf-8")


def of_file(path: Path) -> Parts:
    """A task's file, and all files of its folder or package that it imports anywhere, or has imported already."""
    packages, root = package_of(path)
    folders = [path.parent, root] if packages else [path.parent]
    parts: Parts = {}
    pending = [path, *_files(root, ".".join([*packages, path.stem])), *_loaded(folders)]
    while pending:
        file = pending.pop()
        name = os.path.relpath(file, root)
        if name not in parts:
            parts[name] = _read(file) or ""
            for folder, module in _imports(parts[name], file, folders):
                pending += _files(folder, module)
    return parts


def now(path: Path, kept: Mapping[str, str]) -> Parts:
    """The present texts of the files in `kept`, which `of_file(path)` returned earlier. Missing files are left out."""
    _, root = package_of(path)
    return {name: text for name in kept if (text := _read(root / name)) is not None}


def of_class(kind: type) -> Parts:
    """A task's class, its bases, and the classes and functions that they name, if they are the user's and have a
    source."""
    parts: Parts = {}
    pending: list[Any] = [base for base in kind.__mro__ if _is_users(base)]
    home = _home(kind)
    while pending:
        definition = pending.pop()
        name = f"{definition.__module__}.{definition.__qualname__}"
        if name in parts or not (text := _text(definition)):
            continue
        parts[name] = text
        space = vars(sys.modules[definition.__module__])
        named = {node.id for node in _walk(text) if isinstance(node, ast.Name)}
        others = [space[word] for word in sorted(named & space.keys())]
        others = [other for other in others if inspect.isclass(other) or inspect.isfunction(other)]
        pending += [other for other in others if _is_users(other) and _home(other) == home]
    return parts


def difference(kept: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """A line that says which parts differ, in how many places, and where first. None if all parts mean the same."""
    differences = []
    for name in sorted(kept.keys() | new.keys()):
        if kept.get(name) == new.get(name):
            continue
        if name not in new or name not in kept:
            differences.append(f"{name} is {'new' if name in new else 'gone'}")
        elif text := _first_difference(_units(kept[name]), _units(new[name]), is_file=name.endswith(".py")):
            differences.append(f"{name} differs in {text}")
    return (
        "; ".join(differences[:3]) + (f"; and {len(differences) - 3} more" if len(differences) > 3 else "")
        if differences
        else None
    )


def digest(parts: Mapping[str, str]) -> str:
    """SHA-256 of the meaning of the parts: their code without comments, docstrings and layout."""
    meaning = {name: {unit: text for unit, (text, _) in _units(parts[name]).items()} for name in sorted(parts)}
    return hashlib.sha256(repr(meaning).encode()).hexdigest()


def commit(folder: Path) -> dict[str, Any] | None:
    """The git commit of a folder, and whether tracked files differ from it (`dirty`).

    None outside of a git repository.
    """
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), "status"]
    options = ["--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=_GIT_S)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    names = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if done.returncode or not names:
        return None
    return {"commit": names[0], "dirty": any(not line.startswith("#") for line in lines)}


# ---- files


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _loaded(folders: list[Path]) -> list[Path]:
    """The files of the modules that this process has imported from `folders` under their own names."""
    files = {name: str(getattr(module, "__file__", None)) for name, module in list(sys.modules.items())}
    found = []
    for folder in folders:
        here = {name: Path(file) for name, file in files.items() if file.startswith(f"{folder}{os.sep}")}
        found += [file for name, file in here.items() if file in _files(folder, name)[-1:]]
    return found


def _imports(text: str, file: Path, folders: list[Path]) -> Iterator[tuple[Path, str]]:
    """(folder, dotted name) of each module that a file may import, anywhere in it, also by
    importlib.import_module("NAME")."""
    for node in _walk(text):
        names: list[str] = []
        places: Sequence[Path] = folders
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                places = [file.parents[min(node.level, len(file.parents)) - 1]]
            names = [".".join(filter(None, (node.module, alias.name))) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = getattr(node.args[0], "value", None) if called in ("import_module", "__import__") else None
            names = [name] if isinstance(name, str) else []
        yield from ((folder, name) for folder in places for name in names if name.partition(".")[0] not in PACKAGES)


def _files(folder: Path, module: str) -> list[Path]:
    """The files that Python runs to import a dotted name from `folder`.

    Parts of the name that are not modules are left out.
    """
    files: list[Path] = []
    for part in module.strip(".").split("."):
        folder, file = folder / part, folder / f"{part}.py"
        files += [candidate for candidate in (file, folder / "__init__.py") if candidate.is_file()][-1:]
    return files


# ---- classes and functions


def _is_users(definition: Any) -> bool:
    """True if a class or function belongs neither to Lockstep nor to a library."""
    module = sys.modules.get(definition.__module__)
    file = getattr(module, "__file__", None)
    if module is None or definition.__module__.partition(".")[0] in PACKAGES:
        return False
    return is_own_code(file) if file else definition.__module__ == "__main__"


def _home(definition: Any) -> Path | None:
    """The folder of the file of a class or function, or of the outermost package around the file.

    None without a file.
    """
    file = getattr(sys.modules.get(definition.__module__), "__file__", None)
    return package_of(Path(file).resolve())[1] if file else None


def _text(definition: Any) -> str | None:
    """The source of a class or function; for a class from a notebook, the source of its methods.

    None without a source.
    """
    file = getattr(sys.modules.get(definition.__module__), "__file__", None)
    if file:
        return _definitions(_read(Path(file)) or "").get(definition.__qualname__)
    members: Iterable[Any] = vars(definition).values() if inspect.isclass(definition) else [definition]
    texts = []
    for member in members:
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if inspect.isfunction(function):
            with contextlib.suppress(OSError, TypeError):
                texts.append(textwrap.dedent(inspect.getsource(function)))
    return "\n".join(texts) or None


@functools.lru_cache(maxsize=16)
def _definitions(text: str) -> dict[str, str]:
    """The source of each class and function of a file, by its qualified name."""
    found: dict[str, str] = {}
    lines = text.split("\n")

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            inner = prefix
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found[f"{prefix}{child.name}"] = textwrap.dedent("\n".join(lines[first - 1 : child.end_lineno]))
                inner = f"{prefix}{child.name}." + ("" if isinstance(child, ast.ClassDef) else "<locals>.")
            visit(child, inner)

    visit(_tree(text) or ast.Module([], []), "")
    return found


# ---- what code means


def _tree(text: str) -> ast.Module | None:
    """The syntax tree of a text, which may be an indented class or function. None if the text is not Python."""
    with warnings.catch_warnings(), contextlib.suppress(SyntaxError, ValueError):
        warnings.simplefilter("ignore")  # about escapes in strings: Python has warned at the import
        with contextlib.suppress(SyntaxError):
            return ast.parse(text)
        (block,) = ast.parse(f"if True:\n{textwrap.indent(text, ' ')}").body
        return ast.Module(block.body, []) if isinstance(block, ast.If) else None
    return None


def _walk(text: str) -> Iterator[ast.AST]:
    yield from ast.walk(_tree(text) or ast.Module([], []))


def _strip(tree: ast.AST) -> None:
    """Remove statements that do nothing in an imported module: docstrings, other texts, `if __name__ == "__main__"`."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body:
            nothing = ast.Pass(lineno=body[0].lineno, col_offset=0)
            body[:] = [statement for statement in body if not _does_nothing(statement)] or [nothing]


def _does_nothing(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "__name__ == '__main__'"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@functools.lru_cache(maxsize=128)
def _units(text: str) -> Units:
    """The code without comments and docstrings, and the first line, of each function and class.

    Module code has the name "".
    """
    tree = _tree(text)
    if tree is None:
        return {"": (text, 1)}
    _strip(tree)
    found: Units = {}

    def add(name: str, code: str, line: int) -> None:
        before, first = found.get(name, ("", line))
        found[name] = (f"{before}{code}\n", first)

    def visit(body: list[ast.stmt], name: str) -> None:
        for child in body:
            inner = f"{name}.{getattr(child, 'name', '')}".lstrip(".")
            if isinstance(child, ast.ClassDef):
                inside, child.body = child.body, [ast.Pass()]
                add(inner, ast.unparse(child), child.lineno)
                visit(inside, inner)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                add(inner, ast.unparse(child), child.lineno)
            else:
                add(name, ast.unparse(child), child.lineno)

    visit(tree.body, "")
    return found


def _first_difference(kept: Units, new: Units, is_file: bool) -> str | None:
    """`2 places, first in Mine.loss (from line 14): now "...", before "..."`. None if there is no difference."""
    none = ("", 0)
    units = [unit for unit in {**new, **kept} if kept.get(unit, none)[0] != new.get(unit, none)[0]]
    if not units:
        return None
    first = min(units, key=lambda unit: new[unit][1] if unit in new else sys.maxsize)
    (then, _), (here, line) = (units_of.get(first, none) for units_of in (kept, new))
    before, after = then.splitlines(), here.splitlines()
    pairs = enumerate(zip(before, after, strict=False))
    place = next((number for number, (old, current) in pairs if old != current), min(len(before), len(after)))
    shown = [f'"{lines[place].strip():.{_SHOWN}}"' if place < len(lines) else "nothing" for lines in (after, before)]
    where = f"in {first}" if first else "outside of functions"
    if line and first and is_file:
        where += f" (from line {line})"
    return f"{len(units)} place{'s' if len(units) > 1 else ''}, first {where}: now {shown[0]}, before {shown[1]}"
