"""`lockstep bundle`: a step is made again from one file, without data and ranks; and what is wrong with it is named."""

import json
import os
import re
import shutil
import zipfile

import pytest
import torch

from lockstep.cli import application as cli
from lockstep.core.errors import UsageError
from lockstep_lab.bundle import again, compare, file, make
from tests.ranks import run_ranks
from tests.selection import mainly

from . import cases


def command(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["lockstep", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def from_file(out):
    return compare.compare(again.make(out))


def test_a_step_is_made_again_without_the_data_and_the_code_of_the_task(tmp_path):
    settings = cases.settings_of(tmp_path / "code")
    cases.fit(settings, tmp_path / "run")
    report = cases.bundle(settings, tmp_path / "run", 5, tmp_path / "step.zip")
    assert report.steps[-1].loss == report.logged["train/loss"]
    shutil.rmtree(tmp_path / "code")
    shutil.rmtree(tmp_path / "run")
    found = from_file(tmp_path / "step.zip")
    assert found.is_equal, found.first
    assert compare.text(found).endswith("\nbitwise equal")
    assert len(found.made.step.passes) == 4  # micro-batches
    assert found.made.step.passes[1].gradients.keys() == found.made.step.gradients.keys() != set()
    about = file.read_about(tmp_path / "step.zip")
    left = ["task.data, a Texts", "task.copy, a Tensor"]
    assert [what for what in about["left_out"] if "words" not in what] == left  # cloudpickle writes the lambda
    assert set(file.sources(tmp_path / "step.zip")) == {"0/mine.py", "0/mine_layers.py"}
    assert (tmp_path / "step.zip").stat().st_size < 1 << 20


@pytest.mark.parametrize("ranks", mainly([2], [2, 3]))
def test_what_each_of_several_ranks_computed_is_bitwise_the_same_on_one_process(ranks, tmp_path):
    settings = cases.settings_of(tmp_path / "code")
    run_ranks(ranks, cases.fit, settings, tmp_path / "run")
    run_ranks(ranks, cases.bundle, settings, tmp_path / "run", 5, tmp_path / "step.zip")
    shutil.rmtree(tmp_path / "code")
    found = from_file(tmp_path / "step.zip")
    assert found.is_equal, found.first
    assert [(one.rank, one.number) for one in found.made.step.passes][:: 12 // 3 // ranks or 1][:ranks] == [
        (rank, 0) for rank in range(ranks)
    ] or ranks == 3
    assert {one.rank for one in found.made.step.passes} == set(range(ranks))
    assert re.search(
        r"bitwise equal$|each rank is bitwise equal, and their sum is equal to rounding$", compare.text(found)
    )
    found.made.about["recorded"]["grad_norm"] *= 1.01
    assert compare.compare(found.made).first.startswith("the gradient norm of the step: ")


def test_with_virtual_ranks_the_whole_step_is_bitwise_the_same(tmp_path):
    settings = cases.settings_of(tmp_path / "code", parallel={"virtual_ranks": 2})
    run_ranks(2, cases.fit, settings, tmp_path / "run")
    cases.bundle(settings, tmp_path / "run", 5, tmp_path / "one.zip")
    run_ranks(2, cases.bundle, settings, tmp_path / "run", 5, tmp_path / "two.zip")
    recorded = [file.read_about(tmp_path / name)["recorded"] for name in ("one.zip", "two.zip")]
    assert recorded[0] == recorded[1]
    assert compare.text(from_file(tmp_path / "two.zip")).endswith("\nbitwise equal")


def test_what_differs_first_is_named(tmp_path):
    settings = cases.settings_of(tmp_path / "code")
    cases.fit(settings, tmp_path / "run")
    cases.bundle(settings, tmp_path / "run", 2, tmp_path / "step.zip")
    made = again.make(tmp_path / "step.zip")
    changes = {
        "the tensors of rank 0, micro-batch 1": lambda step: step["passes"][1]["batch"].__setitem__(0, 1),
        "the loss of rank 0, micro-batch 2: loss ": lambda step: step["passes"][2]["losses"].update(loss=0.5),
        "a gradient of rank 0, micro-batch 3, before the exchange: 0.weight": (
            lambda step: step["passes"][3]["gradients"].update({"0.weight": [1, 2]})
        ),
        "the loss of the step: loss ": lambda step: step["losses"].update(loss=0.5),
        "the gradient norm of the step": lambda step: step.update(grad_norm=0.5),
        "a gradient of the step: 3.bias": lambda step: step["gradients"].update({"3.bias": [1, 2]}),
        "the state after the step: optimizer.0.weight.exp_avg": (
            lambda step: step["state"].update({"optimizer.0.weight.exp_avg": [1, 2]})
        ),
    }
    whole = json.dumps(made.about["recorded"])
    for expected, change in changes.items():
        made.about["recorded"] = json.loads(whole)
        change(made.about["recorded"])
        found = compare.compare(made)
        assert found.first.startswith(expected), found.first
        assert f"first difference: {expected}" in compare.text(found)
        assert json.loads(compare.as_json(found))["equal"] is False


def test_commands_and_what_they_refuse(tmp_path, monkeypatch, capsys):
    settings = cases.settings_of(tmp_path / "code")
    cases.fit(settings, tmp_path / "run")
    run, out = tmp_path / "run", tmp_path / "step.zip"
    assert command(monkeypatch, "bundle", run, out, "--step", 7, "--no-check") == 2
    assert "the run has the steps 1 to 6" in capsys.readouterr().err
    assert not out.exists()
    assert command(monkeypatch, "bundle", run, out, "--step", 4, "--no-check") == 0
    shown = capsys.readouterr().out
    assert "this state: bitwise equal to checkpoint" not in shown
    assert re.search(r"written: .*step.zip, 0\.\d MiB: step 4 of \S+, 12 samples in 4 micro-batches of 1 rank\n", shown)
    assert "  left out: task.data, a Texts\n" in shown
    assert command(monkeypatch, "bundle", run, out, "--step", 4, "--no-check") == 2
    assert "exists: it is not overwritten" in capsys.readouterr().err

    assert command(monkeypatch, "replay", out) == 2
    assert "a bundle contains code, which replaying it runs with your rights: a pickle, 0/mine.py" in (
        capsys.readouterr().err
    )
    assert command(monkeypatch, "replay", out, "--trust", "--json", tmp_path / "step.json") == 0
    assert capsys.readouterr().out.endswith("bitwise equal\n")
    assert json.loads((tmp_path / "step.json").read_text())["equal"] is True
    assert command(monkeypatch, "replay", out, "optim.lr=1", "--trust") == 2
    assert "optim.lr belongs to the step" in capsys.readouterr().err
    assert command(monkeypatch, "replay", run) == 2
    assert "give one of them: --step N" in capsys.readouterr().err

    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    assert command(monkeypatch, "replay", out, "--trust") == 2
    assert "is not a whole bundle" in capsys.readouterr().err
    out.write_bytes(whole[:-4000] + bytes(8) + whole[-3992:])
    assert command(monkeypatch, "replay", out, "--trust") == 2
    assert "is not a whole bundle" in capsys.readouterr().err
    edited(out, whole, format=9)
    assert command(monkeypatch, "replay", out, "--trust") == 2
    assert "the bundle has format 9, and this version of Lockstep reads format 1" in capsys.readouterr().err
    edited(out, whole, versions={"torch": "2.0", "lockstep": "0.0.9"}, kind="H100")
    assert command(monkeypatch, "replay", out, "--trust") == 0
    shown = capsys.readouterr().out
    assert f"warning: the bundle was written with torch 2.0, and this is torch {torch.__version__}" in shown
    assert "note: the step was made on H100" in shown


def edited(out, whole, **changes):
    """Write a bundle with other values in `bundle.json`."""
    out.write_bytes(whole)
    with zipfile.ZipFile(out) as archive:
        parts = {one: archive.read(one) for one in archive.namelist()}
    parts["bundle.json"] = json.dumps(json.loads(parts["bundle.json"]) | changes).encode()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    out = tmp_path / "step.zip"
    out.write_text("before")

    def full(into):
        raise OSError(28, os.strerror(28))

    with pytest.raises(UsageError, match="No space left on device"):
        file.write(out, {}, {}, full)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("step.zip", "before")]


def test_data_that_the_loss_needs_are_an_error_that_names_them(tmp_path):
    settings = cases.settings_of(tmp_path / "code")
    code = tmp_path / "code" / "mine.py"
    code.write_text(code.read_text().replace("(self.scale *", "(len(self.data) *"))
    cases.fit(settings, tmp_path / "run")
    cases.bundle(settings, tmp_path / "run", 2, tmp_path / "step.zip")
    with pytest.raises(UsageError, match=r"the step needs task\.data, a Texts, which the bundle does not hold"):
        again.make(tmp_path / "step.zip")


def test_fsdp_and_a_mesh_become_whole_models_with_a_note():
    config = make.Trainer({"parallel": {"strategy": "fsdp", "tensor": 2}}).config
    changed, notes = make.settled(config)
    assert (changed.parallel.strategy, changed.parallel.tensor, len(notes)) == ("ddp", 1, 2)
