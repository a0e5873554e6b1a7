"""A distribution that joins Lockstep by entry points: examples/package, as pip would install it."""

import json
import os
import subprocess
import sys
import tomllib

from tests.processes import HANG_S, ROOT

PACKAGE = ROOT / "examples" / "package"


def installed(site):
    """Write into `site` what pip would: the metadata of the package, and a path to its source."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    about = site / f"{project['name']}-{project['version']}.dist-info"
    about.mkdir(parents=True)
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (about / "entry_points.txt").write_text("\n".join(lines))
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    return os.pathsep.join([str(site), str(PACKAGE / "src")])


IN_TURN = """
import json, sys
from typer.testing import CliRunner
from lockstep.cli.application import app

done = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]
print(json.dumps([(one.exit_code, one.output) for one in done]))
"""


def test_a_distribution_adds_a_task_a_recipe_a_command_and_a_part(tmp_path):
    """In one process: each would import torch again."""
    commands = (
        ["--help"],
        ["wave-length", "--cycles", "4"],
        ["recipes"],
        ["train", "waves", "task.widht=3"],
        ["config", "waves"],
        ["train", "waves", "task.width=16", "train.epochs=20"],
    )
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN, json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": installed(tmp_path / "site")},
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert [code for code, _ in answers] == [0, 0, 0, 2, 0, 0], answers
    listed, length, recipes, wrong, config, trained = (output for _, output in answers)
    assert "wave-length" in listed
    assert length == "0.500\n"
    assert "waves         A small network learns sine waves" in recipes
    assert "width" in wrong
    assert "lr: 0.01" in config
    assert float(trained.rpartition("best loss: ")[2].split()[0]) < 0.1
