"""README.md is short, and its loop is the loop of docs/loop.md, which `test_docs_loop.py` runs."""

import re

from tests.processes import ROOT


def diff_of(page):
    return page.read_text().split("```diff\n")[1].split("```")[0]


def test_the_readme_shows_the_loop_of_its_page():
    assert diff_of(ROOT / "README.md") == diff_of(ROOT / "docs" / "loop.md")


def test_the_readme_has_at_most_600_words():
    """As `wc -w` counts them: blocks of code, tables and links included."""
    assert len((ROOT / "README.md").read_text().split()) <= 600


def test_the_first_link_of_the_readme_is_the_page_on_the_first_ten_minutes():
    assert re.search(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())[1] == "docs/ten_minutes.md"
