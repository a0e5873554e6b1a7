"""`Trainer.fit(task, nproc=2)`, from a notebook and from a script without a guard for the main module."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep import Trainer
from lockstep.core.errors import UsageError
from lockstep.parts.live_line import LiveLine
from tests import own_tasks, runs
from tests.processes import HANG_S, ROOT, environment, launched

SCRIPT = """
import json, os, signal, threading, time
import torch
from torch import nn
from torch.utils.data import Dataset
import lockstep

WIDTH = 6

def values(index):
    return torch.randn(4, generator=torch.Generator().manual_seed(index))

class Values(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return values(index), values(index).sum(0, keepdim=True)

class Mine(lockstep.Task):
    def __init__(self, fails=False, sleeps=0.0):
        self.fails, self.sleeps = fails, sleeps

    def model(self):
        return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def train_data(self):
        return Values()

    def loss(self, model, batch):
        if self.fails and model.training and os.environ["RANK"] == "1":
            raise ValueError("this rank does not like the batch")
        time.sleep(self.sleeps)
        return (model(batch[0]) - batch[1]).square().sum()

def trainer(name, **sections):
    config = {"train": {"steps": 12}, "data": {"workers": 1}, "log": {"every_steps": 4, "writers": ["json_lines"]}}
    return lockstep.Trainer(config | sections, run_dir=name)

found = {}
variables, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
done = trainer("whole")
found["results"] = done.fit(Mine(), nproc=2)
found["variables"] = sorted(name for name, _ in dict(os.environ).items() ^ variables.items())
found["is_latest"] = done.results == found["results"]
found["last_loss"] = done.history[-1]["train/loss"]
found["weights"] = [float(value.detach().sum()) for value in done.model.parameters()]
again = trainer("again")
found["alone"] = again.fit(Mine())["train/loss"]
found["alone_weights"] = [float(value.detach().sum()) for value in again.model.parameters()]
found["goes_on"] = trainer("again", train={"steps": 14}).fit(Mine(), nproc=2)["step"]
try:
    trainer("fails").fit(Mine(fails=True), nproc=2, max_restarts=0)
except lockstep.LockstepError as error:
    found["error"] = type(error).__name__, str(error)
try:
    task = Mine()
    task.lock = threading.Lock()
    trainer("lock").fit(task, nproc=2)
except lockstep.LockstepError as error:
    found["lock"] = str(error)

def stop():
    path = "stopped/metrics.jsonl"
    while not (os.path.exists(path) and open(path).read()):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=stop).start()
stopped = trainer("stopped", train={"steps": 5000})
found["stopped"] = stopped.fit(Mine(sleeps=0.02), nproc=2)["step"], stopped.model is not None
found["same_handler"] = signal.getsignal(signal.SIGINT) == handler
print("FOUND", json.dumps(found))
"""


def run_script(folder):
    return _run(folder, "script.py", SCRIPT)


def run_notebook(folder):
    return _run(folder, "-m", None, "tests.notebook", str(ROOT / "examples" / "digits.ipynb"))


def _run(folder, first, text, *more):
    if text is not None:
        (Path(folder) / first).write_text(text)
    command = [sys.executable, first, *more]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=HANG_S)


@launched(run_script)
def test_script_trains_on_ranks_and_hears_of_their_errors_and_can_be_stopped(launch):
    (done,) = launch.done
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.rpartition("FOUND ")[2])
    assert found["is_latest"]
    assert found["last_loss"] == found["results"]["train/loss"]
    assert found["variables"] == []
    assert found["weights"] == pytest.approx(found["alone_weights"], rel=1e-5)
    assert found["results"]["train/loss"] == pytest.approx(found["alone"], rel=1e-5)
    assert found["goes_on"] == 14  # the source of the task is the same, whoever reads it
    kind, text = found["error"]
    assert kind == "RankError"
    assert "rank 1 failed" in text
    assert 'raise ValueError("this rank does not like the batch")' in text
    assert "cannot be sent to the ranks" in found["lock"]
    assert "Mine.lock, of type lock" in found["lock"]
    step, has_model = found["stopped"]
    assert 4 <= step < 5000
    assert has_model
    assert "the next fit resumes from there" in done.stdout
    assert found["same_handler"]
    header = "2 x cpu with 1 thread each, global batch 32, steps 1 to 12"
    assert done.stdout.count(header) == 2  # done, fails: the ranks' output


@pytest.mark.exhaustive
@launched(run_notebook)
def test_the_notebook_runs_and_shows_how_far_the_training_is(launch):
    (done,) = launch.done
    assert done.returncode == 0, done.stderr
    assert re.search(r"^step \d+/180  loss [\d.]+  \d+ s, about \d+ s left", done.stdout, re.MULTILINE)
    values = dict(re.findall(r"^\[(\d)\]: (.*)$", done.stdout, re.MULTILINE))
    assert float(values["2"]) > 0.9
    assert [step for step, _ in ast.literal_eval(values["4"])] == [45, 90, 135, 180]
    digit, label = ast.literal_eval(values["6"])
    assert digit == label
    assert ast.literal_eval(values["7"])["accuracy"] == pytest.approx(float(values["2"]))


def test_a_rank_starts_no_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="this process is a rank itself"):
        Trainer(runs.config(), run_dir=tmp_path).fit(own_tasks.Plain(), nproc=2)


def test_number_of_ranks_must_be_a_number(tmp_path):
    with pytest.raises(UsageError, match=r"fit\(nproc=...\): 'many' is not a number of ranks"):
        Trainer(runs.config(), run_dir=tmp_path).fit(own_tasks.Plain(), nproc="many")


def test_history_leaves_out_a_line_that_a_kill_has_cut(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": null}\n\n{"step": 2, "train/lo')
    assert Trainer(runs.config(), run_dir=tmp_path).history == [{"step": 1, "train/loss": None}]


def test_history_is_empty_before_the_training_and_needs_its_file(tmp_path):
    assert Trainer(runs.config(), run_dir=tmp_path).history == []
    with pytest.raises(UsageError, match=r"add json_lines to log\.writers"):
        _ = Trainer(runs.config(log={"writers": ["text_log"]}), run_dir=tmp_path).history


def test_public_names_are_listed_and_have_docstrings():
    code = "import lockstep, lockstep_recipes, sys; print(*dir(lockstep)); lockstep_recipes.adapters.lightning; "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert set(lockstep.__all__) < set(done.stdout.split())
    for name in lockstep.__all__:
        assert getattr(lockstep, name).__doc__
        assert f"\n{name}: " in lockstep.__doc__


def test_live_line_stays_last(capsys):
    line = LiveLine()
    line.show("step 1/9  loss 0.5")
    line.above("epoch 1\nbegins")
    line.show("step 2/9")
    line.close()
    shown = [text.rpartition("\r")[2].rstrip() for text in capsys.readouterr().out.split("\n")]
    assert shown == ["epoch 1", "begins", "step 2/9", ""]


def test_class_of_a_script_needs_cloudpickle_and_the_error_says_so(tmp_path, monkeypatch):
    class Mine(own_tasks.Plain):
        pass

    Mine.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match=r"class Mine: .*cloudpickle(?s:.*)pip install cloudpickle"):
        Trainer(runs.config(), run_dir=tmp_path).fit(Mine(), nproc=2)


def test_a_recorder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="a recorder cannot be sent to the ranks"):
        Trainer(runs.config(), run_dir=tmp_path).fit(own_tasks.Plain(), runs.FinalWeights(), nproc=2)
