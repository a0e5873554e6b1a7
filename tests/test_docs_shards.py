"""The example of docs/shards.md runs as it stands; the page names what there is."""

import re

import pytest
from typer.testing import CliRunner

import lockstep_recipes
from lockstep.cli.application import app
from lockstep_recipes.shards.encode import SUFFIXES
from lockstep_recipes.shards.find import FORMATS
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "shards.md").read_text()


@pytest.mark.exhaustive
def test_the_example_writes_shards_and_learns_from_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source, task = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "reviews.py").write_text(source)
    command = re.search(r"^    lockstep (shards reviews.*)$", PAGE, re.MULTILINE)[1]
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    shards = lockstep_recipes.Shards("reviews")
    assert (len(shards), len(shards.shards) > 5) == (3000, True)
    names: dict = {}
    exec(task, names)
    assert names["results"]["eval/accuracy"] > 0.95
    assert (
        "order of the data set, ShardOrder: 3,000 draws of 3,000 samples, 3,000 distinct"
        in (tmp_path / "runs" / "reviews" / "train.log").read_text()
    )


def test_the_page_has_all_formats():
    for form in FORMATS.values():
        for suffix in form.suffixes:
            assert suffix.removesuffix(".gz") in PAGE or suffix == ".mds"
    options = CliRunner().invoke(app, ["shards", "--help"], env={"COLUMNS": "200"}).output
    for name in SUFFIXES:
        assert name in options
