"""Which part of the package may import which, read from the import statements of the source."""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import lockstep
from tests import processes

PACKAGE = Path(lockstep.__file__).parent
AUDIT = processes.ROOT / "packages" / "audit" / "src" / "lockstep_audit"

# The folders that each folder may import, besides itself.
ALLOWED = {
    "core": set(),
    "locks": set(),
    "cache_folder": set(),
    "sizes": {"core"},
    "shards": {"core", "locks", "cache_folder", "sizes"},
    "drawing": {"core"},
    "mesh": {"core"},
    "parts": {"core", "drawing", "locks"},
    "launch": {"core"},
    "updates": {"core"},
    "adapters": {"core"},
    "watch": {"core", "parts", "launch"},
    "weights": {"core"},
    "recipes": {"core", "adapters"},
    "streams": {"core"},
    "lora": {"core"},
    "sampling": {"core", "streams"},
    "tasks": {"core", "drawing", "locks", "recipes", "cache_folder", "shards", "lora"},
    "trainer": {
        "core",
        "locks",
        "parts",
        "launch",
        "mesh",
        "tasks",
        "recipes",
        "sampling",
        "lora",
        "streams",
        "adapters",
        "updates",
        "watch",
        "weights",
    },
    "report": {"core", "locks", "parts", "recipes"},
    "plan": {"core", "mesh", "parts", "tasks", "trainer", "report", "recipes", "sampling", "sizes"},
    "verify": {"core", "parts", "launch", "mesh", "tasks", "trainer", "report", "recipes", "updates"},
    "search": {"core", "drawing", "locks", "recipes", "report", "trainer"},
    "cli": {"core", "parts", "launch", "tasks", "trainer", "verify", "plan", "report", "recipes", "watch"}
    | {"cache_folder", "search", "shards", "sizes"},
    "__main__": {"cli"},
    # Stricter than the folder that they lie in.
    "core.data.order": set(),
    "core.schedule": {"core.config.config_section", "core.errors", "core.history"},
    "core.part": set(),
    "verify.reference": {"core.task", "verify.reference"},  # shares nothing with what it judges
}


def part_of(module):
    """The part that a module belongs to: the longest name in ALLOWED."""
    names = [name for name in ALLOWED if module == name or module.startswith(f"{name}.")]
    return max(names, key=len, default=module)


def folder_of(module):
    return module.split(".")[0]


def is_module(name):
    path = (AUDIT if name.startswith("lockstep_audit") else PACKAGE).parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(path, package="lockstep"):
    """What `path` imports of the package when it runs (not for type checkers alone), as names below the package."""
    return _imports(path, path.read_text(), package)


@functools.cache
def _imports(path, text, package):
    tree, found = ast.parse(text), []
    checking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in checking:
            continue
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inner = [f"{node.module}.{name.name}" for name in node.names]
            names = [name if node.module == package or is_module(name) else node.module for name in inner]
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        found += [name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")]
    return found


def modules(folder):
    """The files of a package, by the names of their modules below the package."""
    paths = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(folder).with_suffix("").parts): path for path in paths}


MODULES = modules(PACKAGE)


def is_allowed(module, name):
    part = part_of(module)
    own = {part} if part in ("core.data.order", "core.schedule", "core.part") else {folder_of(part)}
    own = set() if part == "verify.reference" else own
    return any(name == one or name.startswith(f"{one}.") for one in ALLOWED[part] | own)


def test_modules_import_in_one_direction():
    against = {
        (module, name) for module, path in MODULES.items() for name in imports(path) if not is_allowed(module, name)
    }
    assert against == set()


def packages_of(path):
    """The packages that a file imports, also late and for type checkers alone: the first part of each name."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in found}


def test_the_audit_imports_torch_and_the_standard_library_and_nothing_else():
    known = {"torch", "lockstep_audit", *sys.stdlib_module_names}
    found = {(path.name, name) for path in AUDIT.rglob("*.py") for name in packages_of(path) - known}
    assert found == {("pytest_plugin.py", "pytest")}  # which only pytest imports
    assert not [path for path in AUDIT.rglob("*.py") if re.search(r"""["']lockstep\.""", path.read_text())]


def test_one_file_imports_the_audit():
    naming = {module for module, path in MODULES.items() if "lockstep_audit" in packages_of(path)}
    assert naming == {"cli.audit"}
    for path in PACKAGE.rglob("*.py"):
        assert "lockstep_audit" not in path.read_text() or path == MODULES["cli.audit"], path


def graph(folder=PACKAGE):
    """The modules that each module imports, also late."""
    known = modules(folder)

    def module_of(name):
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    found = {module: {module_of(name) for name in imports(path, folder.name)} for module, path in known.items()}
    return {module: used - {"", module} for module, used in found.items()}


@pytest.mark.parametrize("folder", [PACKAGE, AUDIT], ids=["lockstep", "lockstep_audit"])
def test_no_modules_import_each_other_in_a_circle(folder):
    left = graph(folder)
    while free := [module for module, used in left.items() if not used & left.keys()]:
        for module in free:
            del left[module]
    assert not left, "a circle is among these modules"


def test_folders_stand_on_few_floors():
    """The floor of a folder is one above the highest folder that it imports."""
    used = {folder: set() for folder in map(folder_of, MODULES)}
    for module, others in graph().items():
        used[folder_of(module)] |= {folder_of(other) for other in others} - {folder_of(module)}
    floors = {}
    while len(floors) < len(used):
        ready = [folder for folder in used if folder not in floors and used[folder] <= floors.keys()]
        assert ready, "folders import each other in a circle"
        floors |= {folder: 1 + max((floors[other] for other in used[folder]), default=0) for folder in ready}
    assert max(floors.values()) <= 9


CODE_LINES = {
    "core": 9_973,
    "": 43_179,
    "mesh": 419,
    "mesh/tokens.py": 182,
    "updates": 355,
    "adapters": 1_780,
    "trainer/foreign.py": 55,
    "sampling": 233,
    "streams": 304,
    "verify/by_index.py": 30,
    "verify/cut_model.py": 139,
    "verify/checks/on_mesh.py": 32,
    "verify/draws.py": 70,
    "verify/reference/sampling.py": 50,
    "cli/first_hour.py": 85,
    "cli/audit.py": 60,
    "cli/env.py": 202,
    "tasks/lm": 1_660,
    "tasks/lora": 154,
    "lora": 129,
    "tasks/lm/stream.py": 40,
    "trainer/hub.py": 70,
    "tasks/lm/attention.py": 115,
    "launch/device_check": 450,
    "cli/check_device.py": 61,
    "cli/replay.py": 70,
    "watch/replay_report.py": 220,
    "watch/shares.py": 90,
    "watch": 1_436,
    "core/parallel/posing.py": 20,
    "shards": 654,
    "shards/formats": 440,
    "shards/write.py": 173,
    "shards/encode.py": 130,
    "cli/shards.py": 120,
    "search": 1_171,
    "cli/tune.py": 104,
    "cli/sweep.py": 67,
}
"""At most so many lines of code in a folder, and in all: without blank lines, comments and docstrings.

What came new, such as a recipe, has a budget of its own, and does not count in the folder around it.
What language models need of the engine (units and recomputation of large models, seams of adapters and uploads), and
the command of the audit, took 78 lines beside these. Names of other libraries' classes, and what
verify learns of them, took 32.
What verify, plan and the log need to know of the samples that a data set draws took 74 lines beside these; of streams,
11; of exports without frozen weights, 23. Four lines of the command line name the commands of the search.
What code of Lightning asks for (a trainer in DataModules, optimizers to read, metrics of the training), and the format
that a step computes in, took 86 lines of the adapters; that all commands know the keys of such code, 24 of `trainer`.
What the engine needs to know of a mesh of ranks took 88 lines of `core`, 17 of the language models, 15 elsewhere; what
`plan` needs to know of it, 75 beside 55 of `mesh`. A last layer that is cut over its words, with its loss, and tied
words took 105 lines of `mesh` and 52 of the language models; blocks that hold parts of the tokens, 182.
"""
OF_THEIR_OWN = (
    "mesh",
    "mesh/tokens.py",
    "updates",
    "adapters",
    "trainer/foreign.py",
    "sampling",
    "streams",
    "verify/by_index.py",
    "verify/cut_model.py",
    "verify/checks/on_mesh.py",
    "verify/draws.py",
    "verify/reference/sampling.py",
    "cli/first_hour.py",
    "cli/audit.py",
    "cli/env.py",
    "tasks/lm",
    "tasks/lm/attention.py",
    "tasks/lora",
    "lora",
    "tasks/lm/stream.py",
    "trainer/hub.py",
    "launch/device_check",
    "cli/check_device.py",
    "cli/replay.py",
    "watch/replay_report.py",
    "watch/shares.py",
    "watch",
    "core/parallel/posing.py",
    "shards",
    "shards/formats",
    "shards/write.py",
    "shards/encode.py",
    "cli/shards.py",
    "search",
    "cli/tune.py",
    "cli/sweep.py",
)


@functools.cache
def code_lines(text):
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def test_code_lines_are_counted_without_blank_lines_comments_and_docstrings():
    text = '"""A module."""\n\nimport os  # that\n\n\ndef f(a,\n      b):\n'
    text += '    """Nothing."""\n    # more\n    return (a +\n        b)\n'
    assert code_lines(text) == 5


@pytest.mark.parametrize("folder", CODE_LINES)
def test_a_folder_keeps_its_budget(folder):
    inside = f"{folder}/" if folder else ""
    apart = [PACKAGE / other for other in OF_THEIR_OWN if other.startswith(inside)]
    paths = [PACKAGE / folder] if folder.endswith(".py") else PACKAGE.joinpath(folder).rglob("*.py")
    counted = sum(code_lines(path.read_text()) for path in paths if not {*apart} & {path, *path.parents})
    assert counted <= CODE_LINES[folder]


def test_every_folder_is_there():
    assert {folder_of(module) for module in MODULES} == {folder_of(name) for name in ALLOWED}


def test_imports_are_found_however_they_are_written(tmp_path):
    """The test above can fail: it sees each of these."""
    statements = [
        "import lockstep.trainer.trainer",
        "from lockstep import trainer",
        "from lockstep import Trainer",
        "from lockstep.trainer.trainer import Trainer",
        "def later():\n    from lockstep.trainer.trainer import Trainer",
        "from lockstep import core",
    ]
    found = []
    for statement in statements:
        (tmp_path / "a.py").write_text(statement)
        found += [part_of(name) for name in imports(tmp_path / "a.py")]
    assert found == ["trainer", "trainer", "Trainer", "trainer", "trainer", "core"]


def test_few_folders_know_torch_distributed():
    # A checkpoint's format is not communication: torch.distributed.checkpoint may be named where files are written.
    texts = {module: path.read_text().replace("torch.distributed.checkpoint", "") for module, path in MODULES.items()}
    knowing = {
        module for module, text in texts.items() if "torch.distributed" in text or "DistributedDataParallel" in text
    }
    known = ("core.parallel.", "launch.", "mesh.")
    assert {module for module in knowing if not module.startswith(known)} == set()


LIGHT = """
lockstep lockstep.cli.application lockstep.core.config.sections lockstep.recipes.config_file
lockstep.tasks.text.options lockstep.tasks.vision.pictures.options lockstep.tasks.vision.classification.options
lockstep.tasks.lm.options lockstep.core.data.order lockstep.report.run_page lockstep.report.comparison
lockstep.plan.advise lockstep_audit.judge lockstep_audit.run lockstep.cli.env lockstep.launch.preflight.variables
"""


def test_light_imports_do_not_load_torch():
    check = f"import importlib, sys\nfor name in {LIGHT!r}.split():\n    importlib.import_module(name)\n"
    check += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", check], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


COMMANDS = 17
"""`make test` runs so many commands in the background. Each imports torch anew, so most tests use warm ranks."""


def test_commands_in_the_background_are_within_their_budget(request):
    left_out = ("exhaustive", "gpu", "cluster")
    items = [item for item in request.session.items if not any(map(item.get_closest_marker, left_out))]
    assert processes.count_commands(items) <= COMMANDS


def test_training_imports_neither_torchmetrics_nor_tensorboard_before_the_first_step():
    late = {"torchmetrics", "tensorboard", "PIL", "rich"}
    check = "import lockstep.trainer.trainer, lockstep.tasks.vision.classification.task, sys; "
    check += f"sys.exit(bool({late} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_no_test_waits_for_a_number_of_seconds_that_a_slow_machine_may_need():
    bound = re.compile(r"timeout=\d|monotonic\(\) \+ \d|\.(join|wait)\([1-9]\d*\)")
    here = Path(__file__)
    found = [str(path) for path in here.parent.rglob("*.py") if path != here and bound.search(path.read_text())]
    assert found == [str(here.parent / "launch" / "test_several_nodes.py")]  # another time, and no wait
