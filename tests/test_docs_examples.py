"""docs/examples.md has every recipe and every example, with small images."""

import ast
import importlib.util
import json
import re

from lockstep.configs.registry import recipes
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "examples.md").read_text()


def test_every_recipe_and_example_is_there():
    assert not [name for name in recipes() if f"`{name}`" not in PAGE]
    linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\((\.\./examples/[^)]+)\)", PAGE)}
    files = [path for path in ROOT.glob("examples/**/*.[pi][yp]*") if not {"package", "__pycache__"} & set(path.parts)]
    assert not [path.name for path in files if path not in linked and path.name != "toy.py"]


def test_images_are_few_and_small():
    images = re.findall(r'src="([^"]+)"|!\[[^\]]*\]\(([^)]+)\)', PAGE)
    paths = [ROOT / "docs" / (one or other) for one, other in images]
    assert 0 < len(paths) <= 8
    assert not [path.name for path in paths if path.stat().st_size > 60_000]


def test_notebooks_import_modules_that_exist():
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        nodes = [node for cell in cells for node in ast.walk(ast.parse("".join(cell["source"])))]
        found = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        found |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
        assert found
        assert [name for name in found if importlib.util.find_spec(name) is None] == []
