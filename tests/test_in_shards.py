"""How `make test` chooses its tests, and deals them to processes."""

import json
import re
from pathlib import Path

from tests import in_shards
from tests.processes import ROOT

CONTRACT = (ROOT / "docs" / "contract.md").read_text()


def test_files_are_dealt_by_their_seconds():
    seconds = {"a": 5.0, "b": 3.0, "c": 2.0}
    assert in_shards.shards([["a"], ["b"], ["c"]], seconds, 2) == [["a"], ["b", "c"]]
    assert in_shards.shards([["a"], ["b", "c"], ["d"]], seconds, 2) == [["a", "d"], ["b", "c"]]


def test_one_process_runs_the_files_that_import_the_same_costly_library(tmp_path):
    names = [str(tmp_path / name) for name in "abcd"]
    one, other = in_shards.LIBRARIES[:2]
    texts = (f"import {one}", f'pytest.importorskip("{one}.utils")', f"from {other} import data", "import torch")
    for name, text in zip(names, texts, strict=True):
        Path(name).write_text(text)
    assert in_shards.groups(names) == [names[:2], names[2:3], names[3:]]


def test_the_slowest_tests_are_left_out_until_the_others_fit():
    seconds = {"t.py::one": 5.0, "t.py::two": 4.0, "t.py::three": 3.0, "t.py::four": 1.0}
    assert in_shards.costly(seconds, 8.0, "") == ["t.py::one"]
    assert in_shards.costly(seconds, 13.0, "") == []
    assert in_shards.costly(seconds, 0.0, "") == ["t.py::one", "t.py::two"]  # a file keeps half of its functions


def test_a_file_of_the_contract_keeps_each_function():
    seconds = {"t.py::one[a]": 5.0, "t.py::one[b]": 4.0, "t.py::two": 9.0, "t.py::three": 1.0}
    assert in_shards.costly(seconds, 0.0, "tests/t.py") == ["t.py::one[a]"]


def test_a_report_says_the_seconds_of_each_test_and_each_file_has_a_sum(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    case = '<testcase classname="tests.test_locks{}" name="{}" time="{}"/>'
    cases = [case.format("", "one[a]", 1.5), case.format(".TestLocks", "two", 0.25)]
    (tmp_path / "1.xml").write_text(f"<tests>{''.join(cases)}</tests>")
    seconds = in_shards.by_test([tmp_path / "1.xml"])
    assert seconds == {"tests/test_locks.py::one[a]": 1.5, "tests/test_locks.py::two": 0.25}
    assert in_shards.by_file(seconds, ["tests/test_locks.py", "t.py"]) == {"t.py": 0.0, "tests/test_locks.py": 1.8}


def test_tests_that_are_left_out_are_there_and_none_is_all_of_a_promise():
    left_out = in_shards.COSTLY.read_text().splitlines()
    assert left_out == sorted(left_out)
    functions = {}
    for name in left_out:
        file, _, test = name.partition("::")
        if file not in functions:
            functions[file] = set(re.findall(r"^ *def (\w+)", (ROOT / file).read_text(), re.MULTILINE))
        assert test.partition("[")[0] in functions[file], name
        assert "[" in test or file.rpartition("/")[2] not in CONTRACT, name


HOW_TO_RECORD = "`python tests/in_shards.py --record PATH` records them."
TOO_LONG = (
    "Leave to `make test-all` what runs the same code as another test: the slow cases of a sweep, with their names in "
    "tests/costly.txt or with `mainly` of tests/selection.py. Then record the files again."
)


def test_all_tests_fit_into_the_time_of_make_test():
    """Whoever adds tests pays for them: tests/durations.json has the seconds of what `make test` runs."""
    seconds = json.loads(in_shards.DURATIONS.read_text())
    files = [str(Path(file).relative_to(ROOT)) for file in in_shards.files_of(in_shards.roots())]
    missing, gone = sorted(set(files) - seconds.keys()), sorted(seconds.keys() - set(files))
    assert not missing, f"tests/durations.json lacks the seconds of {missing}. {HOW_TO_RECORD}"
    assert not gone, f"tests/durations.json names files that are not there: {gone}"
    assert sum(seconds.values()) <= in_shards.BUDGET_S, TOO_LONG
