"""Write docs/refused.md from the code: python docs/refused.py > docs/refused.md"""

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "lockstep"
ERRORS = ("UsageError", "TrainingError")
TOPICS = {
    "Tasks: what a user's methods return": [
        "core/task_checks.py",
        "core/heads.py",
        "parts/checks/dry_run.py",
        "core/task.py",
        "updates",
    ],
    "Data": [
        "core/data",
        "core/run_data.py",
        "sampling",
        "parts/checks/untouched_data.py",
        "core/data/same_samples.py",
    ],
    "Models and their state": [
        "core/checkpoint/form.py",
        "core/checkpoint/state.py",
        "parts/checks/first_steps.py",
        "core/run_model.py",
    ],
    "Strategies: DDP, FSDP, ranks": [
        "core/parallel",
        "mesh",
        "launch/*.py",
        "trainer/local_ranks.py",
        "core/debugging.py",
    ],
    "The step: losses, gradients, optimizers, schedules": [
        *(
            f"core/{name}.py"
            for name in ("step", "loop", "batch_norm", "blocks", "optim", "optimizer_class", "schedule")
        ),
        *(
            f"core/{name}.py"
            for name in ("unfreeze", "log_window", "joined_parts", "evaluate", "metric_sync", "plugins")
        ),
        "parts/checks/optimizer_check.py",
    ],
    "Runs, checkpoints and resuming": [
        "core/checkpoint",
        "weights",
        "trainer/run_directory.py",
        "trainer/run_record.py",
        "core/run_folder.py",
        "core/resume.py",
        "core/training_run.py",
        "trainer/trainer.py",
        "trainer/trained_run.py",
    ],
}
HEAD = """# What is refused

Lockstep ends with an error where a training would be wrong, could not be repeated, or could not be resumed. This page
has every such error of the engine and of runs, from the code: `python docs/refused.py` writes the page, and
`tests/test_docs_refused.py` compares. Errors about the keys of a config and about the files of a recipe name file and
key themselves, and are not here. `...` is a name or a value.
"""


def text_of(node: ast.expr | None, names: dict[str, ast.expr]) -> str:
    """A text as the code has it, with `...` for all that is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, names) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, names) + text_of(node.right, names)
    if isinstance(node, ast.Name) and node.id in names:
        return text_of(names[node.id], {name: value for name, value in names.items() if name != node.id})
    if isinstance(node, ast.IfExp):
        return text_of(node.body, names)
    return "..."


def errors_in(path: Path) -> list[tuple[str, str]]:
    """What and remedy of each error that a file makes, in their order."""
    found = []
    tree = ast.parse(path.read_text())
    constants = {
        t.id: n.value for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    }
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for call in (
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") in ERRORS and n.args
    ):
        around = [f for f in functions if f.lineno <= call.lineno <= (f.end_lineno or 0)]
        names = dict(constants)
        for function in around:
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and node.lineno <= call.lineno:
                    names |= {t.id: node.value for t in node.targets if isinstance(t, ast.Name)}
        remedy = next((keyword.value for keyword in call.keywords if keyword.arg == "remedy"), None)
        found.append((call.lineno, text_of(call.args[0], names), text_of(remedy, names) if remedy is not None else ""))
    return [(what, remedy) for _, what, remedy in sorted(found) if what.strip(". ")]


def cell(text: str) -> str:
    """A text as a cell of a table."""
    return " ".join(text.replace("......", "...").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").split())


def page() -> str:
    """The page."""
    parts, done = [HEAD], set()
    for topic, places in TOPICS.items():
        rows = []
        for place in places:
            files = sorted(SOURCE.glob(place if place.endswith(".py") else f"{place}/**/*.py"))
            assert files, f"{place}: no such files"
            for path in files:
                if path not in done:
                    done.add(path)
                    rows += [row for row in errors_in(path) if row not in rows]
        parts.append(f"## {topic}\n\n| what is wrong | what to do |\n|---|---|")
        parts[-1] += "".join(f"\n| {cell(what)} | {cell(remedy)} |" for what, remedy in rows) + "\n"
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
