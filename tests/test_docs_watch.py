"""The example of docs/watch.md ends as the page says."""

import re
import runpy

from lockstep import LockstepError, Trainer
from lockstep.core.checkpoint import store
from tests import runs
from tests.processes import ROOT
from tests.ranks import run_ranks


def error_of(settings, folder):
    task = runpy.run_path(str(ROOT / "examples/lying_device.py"))["Regression"]()
    try:
        Trainer(settings, run_dir=folder, quiet=True).fit(task)
    except LockstepError as error:
        return str(error)
    return None


def test_the_example_ends_as_the_page_says(tmp_path):
    page = (ROOT / "docs/watch.md").read_text()
    command = re.search(r"lockstep train examples/lying_device.py:Regression (.*)", page)[1]
    keys = dict(one.split("=") for one in command.split() if "=" in one)
    settings = runs.config(optim={}) | {"optim": {}}
    for path, value in keys.items():
        section, key = path.split(".")
        settings.setdefault(section, {})[key] = int(value)
    texts = run_ranks(3, error_of, settings, tmp_path / "runs/lying_device")
    text = next(one for one in texts if one.startswith("step "))  # of the rank that said it first
    quoted = " ".join(re.search(r"error: rank 1 failed: (.*?)\n\n", page, re.DOTALL)[1].split())
    place = re.compile(r"\(\w[^)]*, cpu [^)]*\)")  # the host and its processor
    found = " ".join(text.replace(str(tmp_path) + "/", "").split())
    assert place.sub("", found) == place.sub("", quoted)
    saved = store.listed(tmp_path / "runs/lying_device/checkpoints")
    assert [one.step for one in saved] == [15]
