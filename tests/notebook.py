"""Runs the cells of a notebook as a kernel does: in a main module that has no file. `python -m tests.notebook FILE`."""

import ast
import json
import linecache
import sys
from pathlib import Path
from types import ModuleType


def run(path):
    """Run all cells. Prints the value of the last expression of each cell."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["ipykernel"] = ModuleType("ipykernel")
    sys.path[0] = ""
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        text, name = "".join(cell["source"]), f"<cell {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        tree = ast.parse(text)
        last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), vars(main))
        if last is not None:
            print(f"[{number}]: {eval(compile(last, name, 'eval'), vars(main))!r}", flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
