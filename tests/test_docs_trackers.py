"""Each tracker has a page, with the variables that its writer reads."""

import re
from pathlib import Path

import pytest

from lockstep.parts import writers
from tests.processes import ROOT

TRACKERS = ["mlflow", "tensorboard", "trackio", "wandb"]


def test_every_tracker_has_a_page():
    files = sorted(Path(writers.__path__[0]).glob("*.py"))
    known = {path.stem for path in files if "in_own_process = True" in path.read_text()}
    assert {*known, "tensorboard"} == set(TRACKERS)
    overview = (ROOT / "docs" / "trackers.md").read_text()
    assert all(f"(tracker_{name}.md)" in overview for name in TRACKERS)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_page_says_how_to_start_and_what_the_writer_reads(name):
    page = (ROOT / "docs" / f"tracker_{name}.md").read_text()
    source = Path(writers.__path__[0], f"{name}.py").read_text()
    read = re.findall(r'environ\.get\("(\w+)", "(\w+)"\)', source)
    assert all(f"`{variable}`; else `{default}`" in page for variable, default in read)
    assert "log.writers=[" in page
    assert ("torch-lockstep[" in page) == ("library =" in source)
    assert all(f"**{word}.**" in page for word in ("Offline", "Resume", "Ranks"))
