"""How `make test` chooses its tests, and deals them to processes."""

import ast

from tests import in_shards
from tests.processes import ROOT

CONTRACT = (ROOT / "docs" / "contract.md").read_text()


def test_files_are_dealt_by_their_seconds():
    seconds = {"a": 5.0, "b": 3.0, "c": 2.0}
    assert in_shards.shards(["a", "b", "c"], seconds, 2) == [["a"], ["b", "c"]]


def test_the_slowest_tests_are_left_out_until_the_others_fit():
    seconds = {"t.py::one": 5.0, "t.py::two": 4.0, "t.py::three": 3.0, "t.py::four": 1.0}
    assert in_shards.costly(seconds, 8.0, "") == ["t.py::one"]
    assert in_shards.costly(seconds, 13.0, "") == []
    assert in_shards.costly(seconds, 0.0, "") == ["t.py::one", "t.py::two"]  # a file keeps half of its functions


def test_a_file_of_the_contract_keeps_each_function():
    seconds = {"t.py::one[a]": 5.0, "t.py::one[b]": 4.0, "t.py::two": 9.0, "t.py::three": 1.0}
    assert in_shards.costly(seconds, 0.0, "tests/t.py") == ["t.py::one[a]"]


def test_tests_that_are_left_out_are_there_and_none_is_all_of_a_promise():
    left_out = in_shards.COSTLY.read_text().splitlines()
    assert left_out == sorted(left_out)
    functions = {}
    for name in left_out:
        file, _, test = name.partition("::")
        if file not in functions:
            tree = ast.parse((ROOT / file).read_text())
            functions[file] = {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
        assert test.partition("[")[0] in functions[file], name
        assert "[" in test or file.rpartition("/")[2] not in CONTRACT, name
