"""The example of docs/mesh.md runs as it stands, on a mesh, and goes on with one process."""

import os
import re

import pytest

from lockstep import Trainer
from tests import runs
from tests.processes import ROOT
from tests.ranks import run_ranks

PAGE = (ROOT / "docs" / "mesh.md").read_text()


def train(folder, parallel, steps):
    os.chdir(folder)
    settings = runs.config(
        task={"kind": "wide.py:Wide"}, batch={"global": 32}, train={"steps": steps}, parallel=parallel
    )
    return Trainer(settings, run_dir="run", quiet=True).fit()


@pytest.mark.exhaustive
def test_the_example_trains_on_a_mesh_and_goes_on_alone(tmp_path):
    (tmp_path / "wide.py").write_text(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1])
    run_ranks(4, train, tmp_path, {"strategy": "fsdp", "tensor": 2}, 20)
    log = (tmp_path / "run" / "train.log").read_text()
    first_lines = r"^    (mesh: .*|  replicate .*|  12 layers .*|  note: .*|  lockstep verify .*)$"
    for line in re.findall(first_lines, PAGE, re.MULTILINE):
        assert line in log
    (results,) = run_ranks(1, train, tmp_path, {}, 22)
    assert results["step"] == 22
    assert results["train/loss"] < 2.0
