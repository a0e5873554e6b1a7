"""`lockstep verify script.py`: right scripts pass; planted faults are found by the right check, at the right step."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli.application import app
from lockstep.configs import own_file
from lockstep.core.errors import UsageError
from lockstep_lab.verify import report
from lockstep_lab.verify.result import VerifyResult, fault, not_shown, passed
from lockstep_lab.verify.script import verify_script
from lockstep_lab.verify.script_causes import causes_in
from tests import ranks

SCRIPT = """
import os, random, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

torch.manual_seed(0)
inputs, targets = torch.randn(64, 5), torch.randn(64, 1)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), {layer}nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
{before}
loop = lockstep.Loop(
    model, optimizer, TensorDataset(inputs, targets), global_batch=8, epochs=20, run_dir="own", quiet=True{options}
)
for step in loop:
    for x, y in step:
        loss = (loop.model(x) - y).square().mean(){loss}
        step.backward(loss)
    {after}
loop.save("model.pt")
open("after.txt", "w").write("the script went on")
"""
STEPS = 8


def verified(folder, checks=(), **parts):
    """The result of a script with these parts, and the checks by name."""
    text = SCRIPT.format(**{"layer": "", "before": "", "options": "", "loss": "", "after": "pass"} | parts)
    script = folder / "train.py"
    script.write_text(text)
    result = verify_script(
        str(script), [], 2, folder / "out", checks=checks, steps=STEPS, tell=lambda _: None, workers=ranks._ranks
    )
    assert not Path("after.txt").exists()  # no trial runs what follows the loop
    return result, {check.name: check for check in result.checks}


def line_of(folder, text):
    lines = (folder / "train.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_right_script_passes_all_checks_and_its_own_files_are_not_touched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    after = (
        "loop.state['seen'] = loop.state.get('seen', 0) + 1; optimizer.param_groups[0]['lr'] = 0.1 / loop.state['seen']"
    )
    result, checks = verified(tmp_path, layer="nn.BatchNorm1d(8), nn.Dropout(0.3), ", after=after)
    assert list(checks) == ["determinism", "ranks", "accumulation", "strategies", "resume"]
    assert all(check.status == "passed" for check in result.checks), [report.line(check) for check in result.checks]
    assert "without dropout" in checks["ranks"].reason
    assert "BatchNorm (2) with fixed statistics" in checks["ranks"].reason
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "train.py"]
    written = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert written["passed"] is True
    assert written["config"]["steps"] == STEPS
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["verify.html", "verify.json", "verify.log"]


@pytest.mark.parametrize(
    ("parts", "found", "step", "line"),
    [
        # The loss of one rank is another one.
        pytest.param(
            {"loss": " * (1 + (step.number == 3) * int(os.environ.get('RANK', 0)))"},
            ["ranks"],
            3,
            "environ",
            marks=pytest.mark.exhaustive,
        ),
        # Random numbers that are seeded by the rank.
        (
            {
                "before": "rank = int(os.environ['RANK'])",
                "loss": " * (1 + torch.rand((), generator=torch.Generator().manual_seed(rank)) * (step.number > 1))",
            },
            ["ranks"],
            2,
            "environ",
        ),
        # A counter that sets the learning rate, and is not saved.
        pytest.param(
            {"before": "seen = 0", "after": "seen += 1; optimizer.param_groups[0]['lr'] = 0.1 / seen"},
            ["resume"],
            6,
            "seen += 1",
            marks=pytest.mark.exhaustive,
        ),
        # A mean of means over labels that are not as many in each micro-batch.
        ({"loss": " / (y > 0).sum().clamp(min=1)"}, ["ranks", "accumulation"], 1, None),
        # Something that no seed determines.
        ({"loss": " * (1 + int.from_bytes(os.urandom(1), 'big') * (step.number > 4))"}, ["determinism"], 5, None),
    ],
    ids=["loss-by-rank", "random-by-rank", "counter", "mean-of-means", "unseeded"],
)
def test_a_planted_fault_is_found_by_its_check_at_its_step(tmp_path, monkeypatch, parts, found, step, line):
    monkeypatch.chdir(tmp_path)
    checks = ["ranks", *(["resume"] if found == ["resume"] else ["accumulation"])]
    result, checks = verified(tmp_path, checks=checks, **parts)
    assert [check.name for check in result.faults] == found, [report.line(check) for check in result.checks]
    reason = checks[found[0]].reason
    assert f"from step {step} on" in reason
    if line:
        assert f"train.py, line {line_of(tmp_path, line)} " in reason
    if found == ["determinism"]:
        assert list(checks) == ["determinism"]
    if found == ["ranks", "accumulation"]:
        assert "units=" in reason


@pytest.mark.exhaustive  # as random-by-rank above
def test_what_is_drawn_by_a_seed_of_each_rank_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, checks = verified(tmp_path, checks=["ranks", "strategies"], loss=" * (1 + torch.rand(()))")
    assert [check.status for check in result.checks] == ["passed", "not shown", "not shown"]
    assert f"rand at train.py:{line_of(tmp_path, 'torch.rand(())')}" in checks["ranks"].reason
    assert "from step 1 on" in checks["ranks"].reason


def test_data_of_a_rank_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, checks = verified(tmp_path, checks=["ranks"], before="inputs += 0.1 * int(os.environ.get('RANK', 0))")
    assert checks["ranks"].status == "fault"
    assert "sample 0 of rank 1 is not that" in checks["ranks"].reason
    _, checks = verified(tmp_path, checks=["ranks"], before="inputs *= int(os.environ.get('WORLD_SIZE', 1))")
    assert "the training data of rank 0 differ from the run on one rank" in checks["ranks"].reason


def test_a_script_that_leaves_its_loop_early_is_compared_up_to_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, _ = verified(tmp_path, checks=["ranks"], after="if step.number == 4: break")
    assert not result.faults
    assert result.config["steps"] == 4
    assert [path.name for path in tmp_path.iterdir() if path.name in ("model.pt", "own")] == []


def test_a_script_without_a_loop_or_with_an_error_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    for text, words in (("import lockstep", "made no lockstep.Loop"), ("1 / 0", "does not run on one rank")):
        script.write_text(text)
        with pytest.raises(Exception, match=words):
            verify_script(str(script), [], 2, tmp_path / "out", tell=lambda _: None, workers=ranks._ranks)
    with pytest.raises(UsageError, match="there is no check 'gradients'"):
        verify_script(str(script), [], 2, tmp_path / "out", checks=["gradients"])


def test_the_command_passes_arguments_on_and_ends_with_3_where_there_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import lockstep\nlockstep.Loop()")
    for made, code in ((passed("all is right"), 0), (fault("all is wrong"), 3), (not_shown("nobody knows"), 1)):

        def verify(script, arguments, nproc, folder, *, checks, steps, made=made):
            assert (script, arguments, nproc, checks, steps) == ("train.py", ["--lr", "0.1"], 2, ["ranks"], 5)
            return VerifyResult(script, nproc, "cpu", False, {}, {}, [made])

        monkeypatch.setattr("lockstep_lab.verify.script.verify_script", verify)
        words = ["verify", "--cold", "--checks", "ranks", "--steps", "5", "train.py", "--", "--lr", "0.1"]
        found = CliRunner().invoke(app, words)
        assert found.exit_code == code, found.output
        assert "runs/train-verify/verify.json" in found.output


def test_a_run_of_a_loop_has_no_task(tmp_path):
    (tmp_path / "config.yaml").write_text("name: mine\ntrain: {steps: 3}\n")
    for command, *more in (["evaluate"], ["export", "weights"], ["predict", "x.png"]):
        output = CliRunner().invoke(app, [command, str(tmp_path), *more]).output
        assert "loop.evaluate" in output, output
        assert "loop.save" in output, output


# ---- the text of a script


def test_a_script_with_a_loop_is_recognised(tmp_path):
    script = tmp_path / "train.py"
    cases = {
        "import lockstep\nloop = lockstep.Loop()": True,
        "import lockstep as ls\nloop = ls.Loop()": True,
        "from lockstep import Loop": True,
        "import other\nother.Loop()": False,
        "import lockstep\nclass A(lockstep.Task): pass\nlockstep.Loop()": False,
        "loss.backward()": False,
        "def (": False,
    }
    for text, expected in cases.items():
        script.write_text(text)
        assert own_file.is_loop_script(str(script)) == expected, text
    assert not own_file.is_loop_script(f"{script}:Task")
    script.write_text("import lockstep\nloop = lockstep.Loop()\nloss.backward()")
    for command in ("plan", "train", "config"):
        output = CliRunner().invoke(app, [command, str(script)]).output
        assert f"lockstep run --nproc 2 {script}" in output, command
        assert f"lockstep verify {script}" in output, command


def test_the_lines_of_likely_causes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\ncount, best, state = 0, 0.0, {}\nrank = os.environ['RANK']\nfor step in loop:\n    count += 1\n"
        "    best = max(best, value)\n    state['n'] += 1\n    loop.state['n'] += 1\n    total = 0\n    total += 1\n"
        "    noise = torch.randn(3)\n    began = time.time()\n    value = 3\ntorch.randn(4)\n"
    )
    causes = causes_in(str(script))
    lines = {name: [int(text.split()[0]) for text in getattr(causes, name)] for name in ("ranks", "random", "clocks")}
    assert lines == {"ranks": [3], "random": [11], "clocks": [12]}
    assert [int(text.split()[0]) for text in causes.kept] == [5, 6, 7]
