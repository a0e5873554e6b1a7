"""The examples and the page of `Loop`."""

import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.configs import config_file
from lockstep.core.errors import UsageError
from lockstep.trainer import user_exit

ROOT = Path(__file__).parents[1]


@pytest.mark.exhaustive  # test_the_loop_of_the_page_learns runs such a loop
def test_both_examples_learn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "with_lockstep"):
        runpy.run_path(str(ROOT / "examples" / "loop" / f"{name}.py"), run_name="__main__")
        user_exit.close_open()
        last = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 8: accuracy")]
        assert float(last[0].split()[-1]) > 0.93, name
        assert set(torch.load("model.pt")) == {"1.weight", "1.bias", "4.weight", "4.bias"}


@pytest.mark.exhaustive  # longer examples of the loops of the test above
def test_the_pairs_of_examples_train_the_same_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.txt").write_text((ROOT / "README.md").read_text())
    for name in ("train", "test"):
        rows = [f"{topic} word{number},{topic}" for number in range(8) for topic in ("World", "Sports", "Business")]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    arguments = {"news_plain": ".", "news": ".", "letters_plain": "letters.txt", "letters": "letters.txt", "fsdp": ""}
    shapes = {}
    for name, argument in arguments.items():  # fsdp_plain.py needs torchrun
        monkeypatch.setattr(sys, "argv", [f"{name}.py", argument])
        runpy.run_path(str(ROOT / "examples" / "loop" / f"{name}.py"), run_name="__main__")
        user_exit.close_open()
        shapes[name] = {key: value.shape for key, value in torch.load("model.pt").items()}
    assert shapes["news"] == shapes["news_plain"]
    assert shapes["letters"] == shapes["letters_plain"]
    assert shapes["fsdp"]["head.weight"] == (10, 64)


def changed_lines():
    """The lines of a diff in docs/loop.md by their sign."""
    text = (ROOT / "docs" / "loop.md").read_text()
    diff = text.split("```diff\n")[1].split("```")[0].splitlines()
    return {sign: [line[1:] for line in diff if line.startswith(sign)] for sign in "+- "}


def test_the_loop_of_the_page_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    diff = changed_lines()
    inputs = torch.randn(8192, 4)
    labels = (inputs.sum(1) > 0).long()
    data = torch.utils.data.TensorDataset(inputs, labels)
    hidden = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    names = {"torch": torch, "Net": lambda: hidden, "train_data": data}
    names |= {"cross_entropy": torch.nn.functional.cross_entropy}
    exec("\n".join(["import lockstep", *diff[" "], *diff["+"][1:]]), names)
    user_exit.close_open()
    hidden.load_state_dict(torch.load("model.pt"))
    assert float((hidden(inputs).argmax(1) == labels).float().mean()) > 0.8  # 96 updates; 0.5 before


def test_both_pages_show_the_same_diff():
    pages = [ROOT / "docs" / "loop.md", ROOT / "src" / "lockstep" / "migration" / "plain.md"]
    one, other = (page.read_text().split("```diff\n")[1].split("```")[0] for page in pages)
    assert one == other


def test_a_script_with_a_loop_is_recognised_without_running_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("model = 1 / 0\nloss.backward()\n")
    for target in (str(script), f"{script}:model"):
        with pytest.raises(UsageError) as caught:
            config_file.load(target)
        assert "lockstep init --from plain" in str(caught.value), target
        assert f"lockstep run --nproc 2 {script}" in str(caught.value), target
    script.write_text("class MyTask(lockstep.Task): pass\nmodel = 1 / 0\n")
    with pytest.raises(UsageError, match=f"write {script}:MyTask"):
        config_file.load(str(script))


def test_every_argument_on_the_pages_is_one_of_loop():
    text = pages_of_loop()
    named = {name for call in re.findall(r"Loop\(([^`]*)\)", text) for name in re.findall(r"(\w+)=", call)}
    assert named <= set(inspect.signature(lockstep.Loop).parameters)
    assert len(named) >= 8


def pages_of_loop():
    pages = [ROOT / "docs" / "loop.md", ROOT / "src" / "lockstep" / "migration" / "plain.md"]
    return "\n".join(page.read_text() for page in pages)
