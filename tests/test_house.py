"""Which part of the package may import which, read from the import statements of the source."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from tests import processes

PACKAGE = Path(lockstep.__file__).parent

# What is composed into a run.
COMPOSED = {"errors", "config", "checkpoint", "data", "devices", "distributed", "engine", "observe", "tasks"}

# The parts that each part may import, besides itself. A part is a module or a folder.
ALLOWED = {
    "errors": set(),
    "atomic": set(),
    "devices": {"errors", "devices"},
    "locks": set(),
    "debugging": {"errors"},
    "shortages": {"errors"},
    "markup": set(),
    "caller": {"errors"},
    "plugins": {"errors"},
    "part": set(),
    "run_parts": {"errors", "plugins", "part"},
    "data.order": set(),
    "engine.schedule": set(),
    "distributed": {"errors", "debugging", "devices", "shortages", "distributed.launch"},
    "distributed.launch": {"errors", "debugging", "shortages", "distributed", "__main__"},  # a rank runs the command
    "data": {"errors", "debugging", "devices", "shortages", "atomic", "locks", "plugins", "data"},
    "sources": {"errors", "atomic", "locks", "data.order", "data", "images", "volumes"},
    "images": {"errors", "atomic", "locks", "config_section"},
    "volumes": {"errors", "atomic", "data", "images"},
    "checkpoint": {"errors", "devices", "atomic", "distributed"},
    "preflight": {"errors", "devices", "distributed", "checkpoint", "preflight"},
    "engine": {
        "errors",
        "devices",
        "distributed",
        "data",
        "checkpoint",
        "engine",
        "part",
        "tasks.task",
        "tasks.presenter",
    },
    "observe": {"errors", "debugging", "atomic", "locks", "plugins", "observe"},
    "tasks.task": {"errors", "devices", "tasks.presenter"},
    "tasks.presenter": {"errors"},
    "tasks.registry": {"errors", "plugins", "tasks"},
    "tasks": {
        "errors",
        "atomic",
        "plugins",
        "config_section",
        "data",
        "images",
        "volumes",
        "sources",
        "tasks",
        "observe.diagrams",
        "observe.drawing",
    },
    "config_section": set(),
    "config": {"config_section", "errors"},
    "config_layers": {"errors", "config", "config_section", "tasks.registry"},
    "config_file": {"errors", "config", "config_layers", "config_section", "tasks.registry"},
    "cluster": {"errors"},
    "config_text": {"config", "config_file", "config_layers", "config_preset", "config_section", "tasks.registry"},
    "commands": {
        "errors",
        "caller",
        "checkpoint",
        "cluster",
        "config_file",
        "config_preset",
        "config_text",
        "debugging",
        "devices",
        "distributed",
        "local_ranks",
        "observe.predictions",
        "observe.profile",
        "observe.progress",
        "preflight",
        "plan",
        "plan.facts",
        "plan.measure",
        "report",
        "run_directory",
        "shortages",
        "trainer",
        "verify",
    },
    "plan": {
        "errors",
        "devices",
        "engine.schedule",
        "markup",
        "observe.ending",
        "shortages",
        "report",
        "tasks.registry",
        "plan",
        "plan.facts",
    },
    "plan.facts": {
        "errors",
        "shortages",
        "run_model",
        "run_data",
        "data",
        "distributed",
        "engine",
        "plan",
        "plan.trace",
        "tasks",
    },
    "plan.model": {"errors", "run_model", "distributed", "engine"},
    "plan.measure": {"errors", "shortages", "build", "data", "devices", "distributed", "engine", "plan", "trainer"},
    "plan.trace": {"data", "engine"},
    "local_ranks": {"errors", "debugging", "shortages", "devices", "distributed", "observe", "tasks", "trainer"},
    "config_preset": {"errors", "config", "config_file", "config_layers"},
    "verify.reference": {"tasks.task", "verify.reference"},  # shares nothing with what it judges
    "verify.checks": {"engine", "verify"},
    "verify": {
        "errors",
        "shortages",
        "atomic",
        "trainer",
        "build",
        "run_model",
        "resume",
        "checkpoint",
        "data",
        "devices",
        "distributed",
        "engine",
        "tasks",
        "markup",
        "verify",
    },
    "report": {"errors", "atomic", "locks", "markup", "config_layers", "checkpoint", "observe"},
    "observe.predictions": {"errors", "atomic", "observe"},
    "observe.ending": {"observe"},
    "observe.progress": set(),
    "observe.profile": {"errors"},
    "observe.diagrams": {"observe.drawing"},
    "observe.drawing": {"atomic"},
    "run_model": {"errors", "config", "config_file", "checkpoint", "distributed", "engine", "run_directory", "tasks"},
    "run_export": {"data", "engine", "tasks"},
    "run_data": {"errors", "config", "data", "distributed", "engine", "tasks"},
    "build": {*COMPOSED, "run_model", "run_data"},
    "run_folder": {"errors", "atomic", "checkpoint", "observe"},
    "run_directory": {
        "run_folder",
        "errors",
        "devices",
        "atomic",
        "locks",
        "config",
        "config_file",
        "checkpoint",
        "distributed",
        "observe",
        "tasks",
    },
    "resume": {"errors", "config", "checkpoint", "distributed", "engine", "build", "run_directory"},
    "memory_shortage": {"errors", "atomic", "devices", "config", "data", "distributed", "run_data", "run_folder"},
    "first_steps": {"errors", "build", "checkpoint", "data", "engine", "tasks"},
    "run_pictures": {"atomic", "data", "engine", "observe", "tasks", "build", "run_data"},
    "training_run": {
        "caller",
        "memory_shortage",
        "part",
        *COMPOSED,
        "build",
        "run_data",
        "run_directory",
        "run_pictures",
        "resume",
        "first_steps",
    },
    "prediction_run": {"errors", "data", "distributed", "engine", "observe", "tasks", "run_data"},
    "trainer": {
        "caller",
        *COMPOSED,
        "part",
        "run_parts",
        "run_export",
        "memory_shortage",
        "atomic",
        "config_file",
        "images",
        "build",
        "run_model",
        "run_data",
        "run_directory",
        "resume",
        "training_run",
        "prediction_run",
        "local_ranks",
        "preflight",
    },
    "__main__": {"cli"},
    "cli": {"commands"},
}


def part_of(module):
    """The part that a module belongs to: the longest name in ALLOWED."""
    names = [name for name in ALLOWED if module == name or module.startswith(f"{name}.")]
    return max(names, key=len, default=module)


def is_module(name):
    path = PACKAGE.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(path):
    """What `path` imports of the package when it runs (not for type checkers alone), as names below the package."""
    return _imports(path, path.read_text())


@functools.cache
def _imports(path, text):
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
            names = [name if node.module == "lockstep" or is_module(name) else node.module for name in inner]
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        found += [name.removeprefix("lockstep.") for name in names if name.startswith("lockstep.")]
    return found


MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_no_other_parts_than_its_part_may(module):
    part = part_of(module)
    used = {part_of(name): name for name in imports(MODULES[module])}
    outside = {
        name for other, name in used.items() if other != part and not ALLOWED[part] & {other, other.split(".")[0]}
    }
    assert not outside, f"{module} imports {outside}"


def test_every_part_is_there():
    assert set(ALLOWED) == {part_of(module) for module in MODULES}
    assert set().union(*ALLOWED.values()) <= set(ALLOWED)


def test_imports_are_found_however_they_are_written(tmp_path):
    """The test above can fail: it sees each of these."""
    statements = [
        "import lockstep.trainer",
        "from lockstep import trainer",
        "from lockstep import Trainer",
        "from lockstep.trainer import Trainer",
        "def later():\n    from lockstep.trainer import Trainer",
        "from lockstep import distributed",
    ]
    found = []
    for statement in statements:
        (tmp_path / "a.py").write_text(statement)
        found += [part_of(name) for name in imports(tmp_path / "a.py")]
    assert found == ["trainer", "trainer", "Trainer", "trainer", "trainer", "distributed"]


def test_only_the_composition_root_and_the_command_line_know_the_config():
    knowing = {part_of(module) for module, path in MODULES.items() if {"config", "config_file"} & set(imports(path))}
    assert knowing - {"config_file", "config_layers", "config_preset", "config_text"} == {
        "trainer",
        "training_run",
        "run_directory",
        "run_model",
        "run_data",
        "memory_shortage",
        "build",
        "resume",
        "commands",
    }


def test_only_distributed_knows_torch_distributed():
    # A checkpoint's format is not communication: torch.distributed.checkpoint may be named where files are written.
    texts = {module: path.read_text().replace("torch.distributed.checkpoint", "") for module, path in MODULES.items()}
    knowing = {
        module for module, text in texts.items() if "torch.distributed" in text or "DistributedDataParallel" in text
    }
    assert {module for module in knowing if not module.startswith("distributed.")} == set()


LIGHT = """
lockstep lockstep.cli lockstep.config lockstep.config_file lockstep.tasks.text.options lockstep.images.options
lockstep.tasks.classification.options lockstep.data.order lockstep.report.run_page lockstep.report.comparison
lockstep.plan.advise
"""


def test_light_imports_do_not_load_torch():
    check = f"import importlib, sys\nfor name in {LIGHT!r}.split():\n    importlib.import_module(name)\n"
    check += "    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", check], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


COMMANDS = 16
"""`make test` runs so many commands in the background. Each imports torch anew, so most tests use warm ranks."""


def test_commands_in_the_background_are_within_their_budget(request):
    left_out = ("exhaustive", "gpu", "cluster")
    items = [item for item in request.session.items if not any(map(item.get_closest_marker, left_out))]
    assert processes.count_commands(items) <= COMMANDS


def test_training_imports_neither_torchmetrics_nor_tensorboard_before_the_first_step():
    late = {"torchmetrics", "tensorboard", "PIL", "rich"}
    check = (
        f"import lockstep.trainer, lockstep.tasks.classification.task, sys; sys.exit(bool({late} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_no_test_waits_for_a_number_of_seconds_that_a_slow_machine_may_need():
    bound = re.compile(r"timeout=\d|monotonic\(\) \+ \d|\.(join|wait)\([1-9]\d*\)")
    here = Path(__file__)
    found = [str(path) for path in here.parent.rglob("*.py") if path != here and bound.search(path.read_text())]
    assert found == [str(here.parent / "distributed" / "test_several_nodes.py")]  # another time, and no wait
