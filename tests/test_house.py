"""Which part of the package may import which, read from the import statements of the source."""

import ast
import collections
import functools
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from tests import processes

PACKAGE = Path(lockstep.__file__).parent
SOURCES = {"lockstep": PACKAGE} | {
    f"lockstep_{name}": processes.ROOT / "packages" / name / "src" / f"lockstep_{name}"
    for name in ("recipes", "lab", "audit")
}
_PREFIXES = tuple(f"{name}." for name in SOURCES)
AUDIT = SOURCES["lockstep_audit"]
JOINED = [name for name in SOURCES if name != "lockstep_audit"]

# The folders that each folder may import, besides itself.
ALLOWED = {
    "core": set(),
    "locks": set(),
    "losses": {"core"},
    "cache_folder": set(),
    "sizes": {"core"},
    "drawing": {"core"},
    "mesh": {"core"},
    "parts": {"core", "drawing", "locks"},
    "launch": {"core"},
    "updates": {"core"},
    "watch": {"core", "parts", "launch"},
    "weights": {"core"},
    "configs": {"core"},
    "streams": {"core"},
    "lora": {"core"},
    "sampling": {"core", "streams"},
    "trainer": {
        "core",
        "locks",
        "parts",
        "launch",
        "mesh",
        "configs",
        "sampling",
        "lora",
        "streams",
        "updates",
        "watch",
        "weights",
    },
    "cli": {"core", "parts", "launch", "trainer", "configs", "watch", "cache_folder", "lora"},
    "__main__": {"core", "cli"},
    # Stricter than the folder that they lie in.
    "core.data.order": set(),
    "core.schedule": {"core.config.config_section", "core.errors", "core.history"},
    "core.part": set(),
    # The packages that are installed on top of the engine.
    "lockstep_recipes.adapters": {"core"},
    "lockstep_recipes.recipes": {"core"},
    "lockstep_recipes.shards": {"core", "locks", "cache_folder", "sizes"},
    "lockstep_recipes.look": {"core", "drawing"},
    "lockstep_recipes.tasks": {"core", "drawing", "locks", "configs", "cache_folder", "lora", "losses"}
    | {"lockstep_recipes.look", "lockstep_recipes.recipes", "lockstep_recipes.shards"},
    "lockstep_recipes.commands": {"core", "cli", "configs", "sizes"}
    | {"lockstep_recipes.look", "lockstep_recipes.shards", "lockstep_recipes.tasks"},
    "lockstep_lab.report": {"core", "drawing", "locks", "parts", "configs", "trainer"},
    "lockstep_lab.plan": {
        "core",
        "drawing",
        "mesh",
        "parts",
        "trainer",
        "configs",
        "sampling",
        "sizes",
        "lockstep_lab.report",
    },
    "lockstep_lab.verify": {"core", "drawing", "parts", "launch", "mesh", "trainer", "updates", "lockstep_lab.report"},
    "lockstep_lab.search": {"core", "drawing", "locks", "configs", "trainer", "lockstep_lab.report"},
    "lockstep_lab.bundle": {"core", "configs", "parts", "trainer", "updates", "watch"},
    "lockstep_lab.bisect": {"core", "configs", "parts", "trainer", "lockstep_lab.report"},
    "lockstep_lab.commands": {"core", "cli", "configs", "trainer", "sizes", "launch", "watch"}
    | {"lockstep_lab.report", "lockstep_lab.plan", "lockstep_lab.verify", "lockstep_lab.search"}
    | {"lockstep_lab.bisect", "lockstep_lab.bundle"},
    "lockstep_lab.verify.reference": {
        "core.task",
        "core.data.private_generators",
        "lockstep_lab.verify.reference",
    },  # shares nothing else with what it judges
}


def part_of(module):
    """The part that a module belongs to: the longest name in ALLOWED."""
    names = [name for name in ALLOWED if module == name or module.startswith(f"{name}.")]
    return max(names, key=len, default=module)


def folder_of(module):
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in SOURCES else parts[0]


def is_module(name):
    path = SOURCES[name.partition(".")[0]].parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(path):
    """What `path` imports of these packages, also late and for type checkers alone. The engine's names are short."""
    return _imports(path, path.read_text())


@functools.cache
def facts(text):
    """Of a file, from one walk of its tree: import statements, names of public classes, number of code lines."""
    tree = ast.parse(text)
    statements, docstrings, texts = [], set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            statements.append(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno > node.lineno:
            texts.update(range(node.lineno, node.end_lineno + 1))  # a blank line of a text is code
    stripped = enumerate(map(str.strip, text.splitlines()), 1)
    code = {number for number, line in stripped if line and not line.startswith("#")}
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return statements, classes, len((code | texts) - docstrings)


@functools.cache
def _imports(path, text):
    found = []
    for node in facts(text)[0]:
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inner = [f"{node.module}.{name.name}" for name in node.names]
            known = node.module.partition(".")[0] in SOURCES
            names = [name if known and (node.module in SOURCES or is_module(name)) else node.module for name in inner]
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        found += [name.removeprefix("lockstep.") for name in names if name.startswith(_PREFIXES)]
    return found


def modules(*packages):
    """The files of packages, by the names of their modules. Names of the engine are short."""
    found = {}
    for package in packages:
        for path in SOURCES[package].rglob("*.py"):
            if path.name != "__init__.py":
                name = ".".join([package, *path.relative_to(SOURCES[package]).with_suffix("").parts])
                found[name.removeprefix("lockstep.")] = path
    return found


MODULES = modules(*JOINED)


def is_allowed(module, name):
    part = part_of(module)
    own = {part} if part in ("core.data.order", "core.schedule", "core.part") else {folder_of(part)}
    own = set() if part == "lockstep_lab.verify.reference" else own
    return any(name == one or name.startswith(f"{one}.") for one in ALLOWED[part] | own)


def test_modules_import_in_one_direction():
    against = {
        (module, name)
        for module, path in MODULES.items()
        for name in imports(path)
        if not is_allowed(module, name) and not name.startswith("lockstep_audit.")
    }
    assert against == set()


def test_every_permission_is_used():
    used = {folder: set() for folder in ALLOWED}
    for module, path in MODULES.items():
        used[part_of(module)] |= set(imports(path))
    unused = {
        (part, other)
        for part, others in ALLOWED.items()
        for other in others
        if not any(name == other or name.startswith(f"{other}.") for name in used[part])
    }
    assert unused == set()


def test_the_page_on_the_architecture_has_these_rules():
    page = runpy.run_path(str(processes.ROOT / "docs/folders.py"))["page"]()
    assert page == (processes.ROOT / "docs/architecture.md").read_text(), "python docs/folders.py"
    assert page.count("\n| `lockstep_lab/") > 4


def packages_of(path):
    """The packages that a file imports, also late and for type checkers alone: the first part of each name."""
    nodes = facts(path.read_text())[0]
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
    for path in MODULES.values():
        assert "lockstep_audit" not in path.read_text() or path == MODULES["cli.audit"], path


def test_the_engine_imports_no_package_that_is_installed_on_top_of_it():
    engine = modules("lockstep")
    against = {(module, name) for module, path in engine.items() for name in packages_of(path) if name in SOURCES}
    assert {name for _, name in against} == {"lockstep", "lockstep_audit"}  # the audit: see above
    of_lab = {name for path in modules("lockstep_recipes").values() for name in packages_of(path)}
    assert "lockstep_lab" not in of_lab


def test_no_message_installs_from_an_index_what_is_not_there_yet():
    """Before the first release, remedies name the clone, or the package that is missing."""
    pattern = re.compile(r"pip install [^;\n]*torch-lockstep")
    naming = [path for folder in SOURCES.values() for path in folder.rglob("*.py") if pattern.search(path.read_text())]
    assert naming == []


@pytest.mark.cases("vision")
@pytest.mark.parametrize("name", ["vision/use_images.py", "ct/use_volumes.py"])
def test_the_script_of_an_export_has_a_help_and_names_missing_files(name):
    script = SOURCES["lockstep_recipes"] / "tasks" / name
    for words, code, says in (
        (["--help"], 0, "python use_model.py"),
        ([], 1, "python use_model.py"),
        (["a.x", __file__, "b.x"], 1, "error: there is no such file: a.x, b.x\n"),
    ):
        done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)
        assert says in (done.stderr if code else done.stdout)


def graph(*packages):
    """The modules that each module imports, also late and for type checkers alone."""
    known = modules(*packages)

    def module_of(name):
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    found = {module: {module_of(name) for name in imports(path)} for module, path in known.items()}
    return {module: used - {"", module} for module, used in found.items()}


@pytest.mark.parametrize("packages", [JOINED, ["lockstep_audit"]], ids=["joined", "audit"])
def test_no_modules_import_each_other_in_a_circle(packages):
    left = graph(*packages)
    while free := [module for module, used in left.items() if not used & left.keys()]:
        for module in free:
            del left[module]
    assert not left, "a circle is among these modules"


def test_folders_stand_on_few_floors():
    """The floor of a folder is one above the highest folder that it imports."""
    used = {folder: set() for folder in map(folder_of, MODULES)}
    for module, others in graph(*JOINED).items():
        used[folder_of(module)] |= {folder_of(other) for other in others} - {folder_of(module)}
    floors = {}
    while len(floors) < len(used):
        ready = [folder for folder in used if folder not in floors and used[folder] <= floors.keys()]
        assert ready, "folders import each other in a circle"
        floors |= {folder: 1 + max((floors[other] for other in used[folder]), default=0) for folder in ready}
    assert max(floors.values()) <= 9


CEILINGS = {"lockstep": 32_200, "lockstep_recipes": 21_500, "lockstep_lab": 14_500, "lockstep_audit": 9_300}
"""At most so many lines of code in a package, without blank lines, comments and docstrings: round, with 5 % slack. They
change with a release only."""


def test_code_lines_are_counted_without_blank_lines_comments_and_docstrings():
    text = '"""A module."""\n\nimport os  # that\n\n\ndef f(a,\n      b):\n'
    text += '    """Nothing."""\n    # more\n    return (a +\n        b)\n\n\nTEXT = """\n\n# b\n"""\n'
    assert facts(text)[2] == 9


def test_packages_keep_their_ceilings():
    counted = {
        name: sum(facts(path.read_text())[2] for path in folder.rglob("*.py")) for name, folder in SOURCES.items()
    }
    assert all(counted[name] <= CEILINGS[name] for name in CEILINGS), counted


def test_a_name_of_a_class_means_one_thing():
    paths = [path for folder in SOURCES.values() for path in folder.rglob("*.py")]
    found = [name for path in paths for name in facts(path.read_text())[1]]
    assert {name for name, count in collections.Counter(found).items() if count > 1} == set()


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
        "if TYPE_CHECKING:\n    from lockstep.trainer.trainer import Trainer",
        "from lockstep import core",
    ]
    found = []
    for statement in statements:
        (tmp_path / "a.py").write_text(statement)
        found += [part_of(name) for name in imports(tmp_path / "a.py")]
    assert found == ["trainer", "trainer", "Trainer", "trainer", "trainer", "trainer", "core"]


def test_one_module_of_a_package_asks_whether_this_process_is_a_rank():
    """The variables of a rank are set for other processes, and shown, elsewhere. They are read in one place."""
    names = re.compile(r"""["'](LOCAL_)?(RANK|WORLD_SIZE)["']""")
    read = re.compile(rf"(os.environ(.get)?|os.getenv)[\[(]{names.pattern}.*|{names.pattern} (not )?in os.environ")
    kinds = (ast.Subscript, ast.Call, ast.Compare)

    def asks(text):
        nodes = ast.walk(ast.parse(text)) if names.search(text) else ()
        return any(isinstance(node, kinds) and read.fullmatch(ast.unparse(node)) for node in nodes)

    found = {path for folder in SOURCES.values() for path in folder.rglob("*.py") if asks(path.read_text())}
    assert found == {PACKAGE / "core" / "this_process.py", AUDIT / "this_process.py"}


def test_few_folders_know_torch_distributed():
    # A checkpoint's format is not communication: torch.distributed.checkpoint may be named where files are written.
    texts = {module: path.read_text().replace("torch.distributed.checkpoint", "") for module, path in MODULES.items()}
    knowing = {
        module for module, text in texts.items() if "torch.distributed" in text or "DistributedDataParallel" in text
    }
    known = ("core.parallel.", "launch.", "mesh.")
    assert {module for module in knowing if not module.startswith(known)} == set()


LIGHT = """
lockstep lockstep.cli.application lockstep.core.config.sections lockstep.configs.config_file
lockstep_recipes.tasks.text.options lockstep_recipes.tasks.vision.images.options
lockstep_recipes.tasks.vision.classification.options
lockstep_recipes.tasks.lm.options
lockstep.core.data.order lockstep_lab.report.run_page lockstep_lab.report.comparison
lockstep_lab.plan.advise lockstep_audit.judge lockstep_audit.run lockstep.cli.env lockstep.launch.preflight.variables
"""


def test_light_imports_do_not_load_torch_and_a_training_loads_the_rest_late():
    check = f"import importlib, sys\nfor name in {LIGHT!r}.split():\n    importlib.import_module(name)\n"
    check += "    assert 'torch' not in sys.modules, name\n"
    check += "import lockstep.trainer.trainer, lockstep_recipes.tasks.vision.classification.task\n"
    check += "early = {'torchmetrics', 'tensorboard', 'PIL', 'rich'} & sys.modules.keys()\nassert not early, early"
    done = subprocess.run([sys.executable, "-c", check], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


COMMANDS = 17
"""`make test` runs so many commands in the background. Each imports torch anew, so most tests use warm ranks."""


def test_commands_in_the_background_are_within_their_budget(request):
    left_out = ("exhaustive", "gpu", "cluster")
    items = [item for item in request.session.items if not any(map(item.get_closest_marker, left_out))]
    assert processes.count_commands(items) <= COMMANDS


def test_no_test_waits_for_a_number_of_seconds_that_a_slow_machine_may_need():
    bound = re.compile(r"timeout=\d|monotonic\(\) \+ \d|\.(join|wait)\([1-9]\d*\)")
    here = Path(__file__)
    found = [str(path) for path in here.parent.rglob("*.py") if path != here and bound.search(path.read_text())]
    assert found == [str(here.parent / "launch" / "test_several_nodes.py")]  # another time, and no wait
