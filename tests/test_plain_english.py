"""docs/plain_english.py finds the habits that docs/style.md names, in prose and nowhere else."""

import runpy

from tests.processes import ROOT

CHECKER = runpy.run_path(str(ROOT / "docs" / "plain_english.py"))


def found(path, text):
    path.write_text(text)
    return [(line, words) for line, words, _ in CHECKER["findings"](path)]


def test_it_reads_pages_docstrings_comments_and_messages(tmp_path):
    page = "The run goes on from step 3, beside others.\n\n```\nit goes on\n```\n\n`goes on` is code.\n"
    assert found(tmp_path / "a.md", page) == [(1, "goes on"), (1, "beside")]
    code = '"""It has a folder of its own."""\n\nbeside = 1  # read anew\nraise E(f"{x} is no file")\nname = "beside"\n'
    assert found(tmp_path / "a.py", code) == [(1, "of its own"), (3, "anew"), (4, "is no")]


def test_idioms_are_not_habits(tmp_path):
    page = "There is no GPU. It is no longer there. A warning is printed on rank 0 only, and goes on the console.\n"
    assert found(tmp_path / "a.md", page) == []
