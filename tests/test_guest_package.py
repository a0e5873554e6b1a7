"""A distribution that joins Lockstep by entry points: examples/package, as pip would install it."""

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


def test_a_distribution_adds_a_task_a_recipe_a_command_and_a_part(tmp_path):
    path = installed(tmp_path / "site")

    def call(*arguments, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            timeout=HANG_S,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "wave-length" in call("--help")
    assert call("wave-length", "--cycles", "4") == "0.500\n"
    assert "waves         A small network learns sine waves" in call("recipes")
    assert "width" in call("train", "waves", "task.widht=3", code=2)
    assert "lr: 0.01" in call("config", "waves")
    output = call("train", "waves", "task.width=16", "train.epochs=20")
    assert float(output.rpartition("best loss: ")[2].split()[0]) < 0.1
