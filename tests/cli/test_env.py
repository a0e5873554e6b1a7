"""`lockstep doctor env`: what a bug report should say."""

import json
import os
import resource
import shutil
import socket
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lockstep
from lockstep.cli import env
from lockstep.cli.application import app
from lockstep.configs import registry
from tests.processes import ROOT


def collected(**variables):
    done = CliRunner(env=variables).invoke(app, ["doctor", "env", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_it_says_what_the_system_says():
    found = collected(HF_TOKEN="hf_secret", NCCL_DEBUG="INFO")
    assert found["versions"]["lockstep"].startswith(f"{lockstep.__version__}, ")
    assert found["versions"]["torch"].startswith(f"{torch.__version__}, ")
    assert found["versions"]["numpy"] == metadata.version("numpy")
    assert found["devices"]["CPUs allowed"] == str(len(os.sched_getaffinity(0)))
    assert found["network"]["host"].startswith(f"{socket.gethostname()}: ")
    assert found["network"]["lo"] == "127.0.0.1"
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found["limits"]["open files"].replace(",", "").startswith(str(soft))
    total = shutil.disk_usage(Path.cwd()).total / 2**30
    assert f" of {total:,.1f} GiB free" in found["disks"]["working folder"]
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert found["variables"]["HF_TOKEN"] == "(not shown)"
    assert "hf_secret" not in json.dumps(found)


def test_the_text_can_be_pasted(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    found = {"versions": {"lockstep": "0.1.0, /home/ada/lib", "os": "x"}, "variables": {}}
    assert env.text(found) == "versions:\n  lockstep  0.1.0, ~/lib\n  os        x"
    said = CliRunner().invoke(app, ["doctor", "env"]).stdout
    assert [line for line in said.splitlines() if not line.startswith(" ")][:4] == [
        "versions:",
        "devices:",
        "network:",
        "limits:",
    ]


def test_it_works_where_torch_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # every import of torch then raises ImportError
    found = collected()
    assert found["versions"]["torch"].startswith(f"{metadata.version('torch')}: cannot be imported: ")
    assert found["devices"]["gpus"].startswith("cannot be asked: ")
    assert found["recipes"]


def test_the_other_distribution_of_the_same_module_is_named(monkeypatch):
    known = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1" if name == "lockstep" else known(name))
    assert "pip uninstall lockstep torch-lockstep" in collected()["versions"]["warning"]


def test_every_kind_of_task_and_every_recipe_has_its_extras():
    assert set(env._EXTRAS) == set(registry.kinds())
    needs = {name: env.needs(name, file.read_text()) for name, file in registry.recipes().items()}
    assert needs["digits"] == needs["toy"] == ()
    assert needs["text"] == needs["lm"] == ("text",)
    assert needs["nlst"] == ("ct",)
    assert needs["imagenet"] == ("images",)


def test_every_extra_for_users_is_shown():
    shown = {*env._BEYOND_RECIPES, *(extra for extras in env._EXTRAS.values() for extra in extras)}
    of_sets, of_developers = {"lm", "all", "recipes", "lab", "audit"}, {"dev", "docs", "cluster-test"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert shown | of_sets | of_developers == set(project["optional-dependencies"])


REQUIRES = [
    "torch>=2.11",
    'pillow>=10.1; extra == "images"',
    'torch-lockstep[images]; extra == "ct"',
    'nibabel>=5.2; extra == "ct"',
]


@pytest.mark.parametrize(
    ("extra", "installed", "missing"),
    [
        ("", {"torch": "2.13.0+cpu"}, []),
        ("", {"torch": "2.10.0"}, ["torch>=2.11 (2.10.0 is installed)"]),
        ("images", {}, ["pillow>=10.1"]),
        ("ct", {"pillow": "9.5"}, ["pillow>=10.1 (9.5 is installed)", "nibabel>=5.2"]),
        ("ct", {"pillow": "13.0.0", "nibabel": "5.4.2"}, []),
    ],
)
def test_what_is_missing_is_read_from_the_metadata(monkeypatch, extra, installed, missing):
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    assert env.missing_packages(extra, installed.get) == missing


def test_without_metadata_it_says_so(monkeypatch):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert set(collected()["recipes"].values()) == {"not known: torch-lockstep is not installed by pip"}
