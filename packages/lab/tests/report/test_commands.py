"""The commands `lockstep report` and `lockstep compare`."""

import pytest
from typer.testing import CliRunner

from lockstep.cli.application import app
from packages.lab.tests.report.cases import write_run


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_report(tmp_path):
    folder = write_run(tmp_path)
    result = call("report", folder)
    assert (result.exit_code, result.output) == (0, f"written: {folder}/report.html\n")
    assert call("report", folder, "--out", tmp_path / "x.html").exit_code == 0
    assert (tmp_path / "x.html").is_file()


def test_compare(tmp_path):
    folders = [write_run(tmp_path / name) for name in ("one", "two")]
    result = call("compare", *folders, "--out", tmp_path / "x.html")
    assert result.exit_code == 0
    assert "no key differs" in result.output
    assert result.output.endswith(f"written: {tmp_path}/x.html\n")


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_folder_that_is_no_run(tmp_path, command):
    result = call(command, tmp_path, tmp_path) if command == "compare" else call(command, tmp_path)
    assert result.exit_code == 2
    assert "not a run directory" in result.output


def test_a_place_that_cannot_be_written(tmp_path):
    result = call("report", write_run(tmp_path / "run"), "--out", tmp_path / "none" / "x.html")
    assert result.exit_code == 2
    assert "--out" in result.output


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_folder_as_the_place_of_the_page(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    folders = [write_run(tmp_path / name) for name in ("one", "two")]
    for place in (".", "one"):
        result = call(command, *(folders if command == "compare" else folders[:1]), "--out", place)
        assert result.exit_code == 2
        assert f"error: {place}: is a folder" in result.output


def test_a_page_of_somebody_else_stays_and_an_earlier_page_is_replaced(tmp_path):
    run, other = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    page = run / "report.html"
    for command in (["report", run], ["compare", run, other, "--out", page]):
        page.write_text("<h1>My own page</h1>")
        done = call(*command)
        assert done.exit_code == 2
        assert "report.html: exists, and this command did not write it: it is not overwritten" in done.stderr
        assert page.read_text() == "<h1>My own page</h1>"
        page.unlink()
        assert [call(*command).exit_code for _ in range(2)] == [0, 0]
