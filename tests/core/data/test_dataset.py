"""The optional members of a data set are documented, and read in one place."""

import ast
import re

from torch.utils.data import Dataset

from lockstep.core.data import dataset
from tests.processes import ROOT
from tests.test_house import MODULES

PAGE = (ROOT / "docs/data_sets.md").read_text()
APART = "lockstep_lab.verify.reference."  # shares nothing with what it judges


def test_every_member_is_described():
    described = {*dataset.OptionalMembers.__annotations__, *vars(dataset.OptionalMembers)} - {"check"}
    assert set(dataset.MEMBERS) == {name for name in described if name in dataset.MEMBERS or name[0] != "_"}
    rows = "".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))
    assert set(re.findall(r"`(\w+)", rows)) == set(dataset.MEMBERS)


def test_members_are_read_in_one_place():
    names = re.compile(rf"[\"']({'|'.join(dataset.MEMBERS)})[\"']")

    def reads(text):
        if not names.search(text):
            return []  # parsing takes long
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and len(node.args) > 1]
        named = [call for call in calls if getattr(call.func, "id", "") in ("getattr", "hasattr", "setattr")]
        return [call.args[1].value for call in named if getattr(call.args[1], "value", None) in dataset.MEMBERS]

    found = {module: read for module, path in MODULES.items() if (read := reads(path.read_text()))}
    assert {module for module in found if not module.startswith(APART)} == set()
    assert found  # the reading above finds those of the reference


def test_the_data_set_of_the_page(tmp_path):
    names = {"Dataset": Dataset}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], names)
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("three")
    data = names["Sentences"](tmp_path.iterdir())
    assert dataset.member_of(data, "lengths") == [5, 3]
    assert data[1] == "two"
    assert dataset.name_of(data, 0) == str(tmp_path / "a.txt")
    assert dataset.name_of([1, 2], 1) == "list[1]"
    assert dataset.member_of([], "order") is None
    assert dataset.forward(data) is None
