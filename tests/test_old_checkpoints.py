"""Checkpoints of released versions are evaluated and resumed as the run would have been that wrote them."""

import json
import tarfile

import pytest
from typer.testing import CliRunner

import lockstep
from lockstep.cli.application import app
from tests.checkpoints.make import CONFIG, HERE

VERSIONS = sorted(path.name.removesuffix(".tar.gz") for path in HERE.glob("*.tar.gz"))


def call(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def results(run):
    return json.loads(call("evaluate", run, "device=cpu"))


@pytest.fixture(params=VERSIONS)
def old(request, tmp_path):
    with tarfile.open(HERE / f"{request.param}.tar.gz") as archive:
        archive.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


def test_there_is_one_of_every_version():
    assert lockstep.__version__ in VERSIONS


def test_it_is_evaluated_as_it_was(old):
    (manifest,) = old.glob("checkpoints/step-*/manifest.json")
    recorded = json.loads(manifest.read_text())["checkpoint"]["metrics"]
    assert recorded["eval/samples"] == 200
    assert results(old)["eval/loss"] == pytest.approx(recorded["eval/loss"], rel=1e-5)


def test_it_goes_on_as_if_nothing_had_happened(old, tmp_path):
    """The same eight steps without an end in between give the same averaged weights, and so the same loss."""
    config = [*CONFIG, "train.steps=8", "device=cpu"]
    assert "resuming" in call("train", *config, "--run-dir", old)
    call("train", *config, "--run-dir", tmp_path / "whole")
    assert results(old)["eval/loss"] == pytest.approx(results(tmp_path / "whole")["eval/loss"], rel=1e-5)
