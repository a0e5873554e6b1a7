"""The loop that README.md shows is the loop of docs/loop.md, which `test_docs_loop.py` runs."""

from tests.processes import ROOT


def diff_of(page):
    return page.read_text().split("```diff\n")[1].split("```")[0]


def test_the_readme_shows_the_loop_of_its_page():
    assert diff_of(ROOT / "README.md") == diff_of(ROOT / "docs" / "loop.md")
