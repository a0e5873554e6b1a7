"""docs/refused.md has every error of the engine and of runs."""

import runpy

from tests.processes import ROOT


def test_the_page_is_that_of_the_code():
    page = runpy.run_path(str(ROOT / "docs/refused.py"))["page"]()
    assert page == (ROOT / "docs/refused.md").read_text(), "python docs/refused.py > docs/refused.md"
    assert page.count("\n| ") > 100
    assert "returns a mean, not the SUM over its units" in page
    assert "a forward pass has changed which parameters train" in page
