"""`lockstep run`, before it starts a script."""

from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from lockstep.cli.application import app
from lockstep.cli.run import OPTIONS

SCRIPT = """
import torch
import lockstep

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in lockstep.Loop(model, optimizer, torch.randn(8, 2), global_batch=4, steps=3):
    for batch in step:
        step.backward(model(batch).square().mean())
"""


def run(*words):
    return CliRunner().invoke(app, ["run", *words])


@pytest.mark.parametrize(
    ("script", "words", "right"),
    [
        ("print('it ran')", ["SCRIPT", "--nproc", "2"], "--nproc 2 SCRIPT"),
        ("print('it ran')", ["--cold", "SCRIPT", "--lr", "1", "--max-restarts=1", "x"], None),
        ("print('it ran')", ["SCRIPT", "data", "--debug", "x"], "--debug SCRIPT data x"),
        ("print('it ran')  # --nproc is its own", ["SCRIPT", "--nproc", "2"], ""),
        ("print('it ran')", ["--", "SCRIPT", "--nproc", "2"], ""),
        ("print('it ran')", ["SCRIPT", "--lr", "0.1", "-v"], ""),
    ],
)
def test_an_option_after_a_script_that_does_not_have_it_is_an_error_with_the_right_order(
    tmp_path, script, words, right
):
    path = tmp_path / "train.py"
    path.write_text(script)
    right = "--cold --max-restarts=1 SCRIPT --lr 1 x" if right is None else right
    done = run(*[str(path) if word == "SCRIPT" else word for word in words])
    assert done.exit_code == (2 if right else 0), done.output
    if right:
        kept = " ".join([*words[: words.index("SCRIPT")], "--", *words[words.index("SCRIPT") :]])
        remedy = f"write lockstep run {right}; if the script has it: lockstep run {kept}"
        assert remedy.replace("SCRIPT", str(path)) in done.stderr


def test_the_order_is_checked_for_all_options_of_the_command():
    taken = [(name, one) for one in get_command(app).commands["run"].params for name in one.opts]
    assert {name: not one.is_flag for name, one in taken if name.startswith("--")} == OPTIONS


def test_fresh_deletes_the_run_of_each_loop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert "steps 1 to 3" in run("train.py").stdout
    assert "no step is left" in run("train.py").stdout
    assert "steps 1 to 3" in run("--fresh", "train.py").stdout
    assert "no step is left" in run("train.py").stdout
