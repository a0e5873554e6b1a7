"""Who may import whom (DESIGN, section 4), from the source's own import statements."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

PACKAGE = Path(lockstep.__file__).parent

# What each part may import of the package, besides itself.
ALLOWED = {
    "errors": set(),
    "atomic": set(),
    "locks": set(),
    "data.order": set(),
    "engine.schedule": set(),
    "distributed": {"errors"},
    "data": {"errors", "atomic", "locks", "data"},
    "sources": {"errors", "data.order", "data.cache"},
    "checkpoint": {"errors", "atomic", "distributed"},
    "engine": {"errors", "distributed", "data", "checkpoint", "engine", "tasks.task"},
    "observe": {"errors", "atomic", "observe"},
    "tasks.task": {"errors", "tasks.presenter"},
    "tasks.presenter": {"errors"},
    "tasks.registry": {"errors", "tasks"},
    "tasks": {"errors", "atomic", "config_section", "data", "sources", "tasks"},
    "config_section": set(),
    "config": {"config_section"},
    "config_file": {"errors", "config", "config_section", "tasks.registry"},
    "verify": {
        "errors",
        "atomic",
        "trainer",
        "build",
        "resume",
        "checkpoint",
        "data",
        "distributed",
        "engine",
        "tasks",
        "verify",
    },
    "observe.predictions": {"errors", "atomic", "observe"},
    "cli": {
        "errors",
        "config_file",
        "distributed",
        "checkpoint",
        "observe.predictions",
        "trainer",
        "run_directory",
        "verify",
    },
}


def part_of(module):
    return next(
        (name for name in sorted(ALLOWED, key=len, reverse=True) if module == name or module.startswith(f"{name}.")),
        module,
    )


def imports(path):
    """Modules of the package that `path` imports when it runs (not those for type checkers alone)."""
    tree = ast.parse(path.read_text())
    checking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in checking:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lockstep":
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if (PACKAGE.parent / (inner.replace(".", "/") + ".py")).exists() else node.module
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "lockstep")


MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_stay_within_what_the_design_allows(module):
    part = part_of(module)
    if part in ("trainer", "run_directory", "build", "resume", "__main__"):  # the composition root knows everything
        return
    used = {name.removeprefix("lockstep").removeprefix(".") for name in imports(MODULES[module])} - {""}
    outside = {
        name
        for name in used
        if part_of(name) != part
        and part_of(name).split(".")[0] not in ALLOWED[part]
        and part_of(name) not in ALLOWED[part]
    }
    assert not outside, f"{module} imports {outside}"


def test_only_the_composition_root_and_the_command_line_know_the_config():
    knowing = {
        module
        for module, path in MODULES.items()
        if any(name in ("lockstep.config", "lockstep.config_file") for name in imports(path))
    }
    assert knowing - {"config_file"} == {"trainer", "run_directory", "build", "resume", "cli"}


def test_only_distributed_knows_torch_distributed():
    # A checkpoint's format is not communication: torch.distributed.checkpoint may be named where files are written.
    texts = {module: path.read_text().replace("torch.distributed.checkpoint", "") for module, path in MODULES.items()}
    knowing = {
        module for module, text in texts.items() if "torch.distributed" in text or "DistributedDataParallel" in text
    }
    assert {module for module in knowing if not module.startswith("distributed.")} == set()


@pytest.mark.parametrize(
    "code",
    [
        "import lockstep",
        "import lockstep.cli",
        "import lockstep.config",
        "import lockstep.config_file",
        "import lockstep.tasks.text.options",
        "import lockstep.data.order",
    ],
)
def test_light_imports_do_not_load_torch(code):
    check = f"{code}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_training_imports_neither_torchmetrics_nor_tensorboard_before_the_first_step():
    check = "import lockstep.trainer, lockstep.tasks.classification.task, sys; sys.exit(bool({'torchmetrics', 'tensorboard', 'PIL', 'rich'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
