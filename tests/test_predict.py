"""`lockstep predict` on files: every file once and in order, on any number of ranks, and what happens to bad files."""

import csv
import json
import shutil
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from lockstep import Trainer
from lockstep.cli import application as cli
from lockstep.cli import predict
from tests import rank_cases
from tests.ranks import run_ranks
from tests.selection import mainly

TASK = """
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep_recipes.tasks.readers.input_files import find_files


class Numbers(torch.utils.data.Dataset):
    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return torch.tensor([float(self.paths[index].read_text())]), torch.zeros(1)

    def where(self, index):
        return str(self.paths[index])


class Show(lockstep.Presenter):
    def inputs(self, arguments):
        return Numbers(find_files(arguments, [".txt"]))

    def describe(self, output):
        return {"twice": float(output[0]), "all": output[: self.task.top_k]}


class Double(lockstep.Task):
    presenter = Show

    def __init__(self, top_k: int = 1):
        self.top_k = top_k

    def model(self):
        return nn.Linear(1, 1)

    def train_data(self):
        return TensorDataset(torch.ones(8, 1), torch.ones(8, 1))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum()

    def predict(self, model, batch):
        return torch.cat([2 * batch[0], 3 * batch[0], 0 * model(batch[0])], dim=1)


class ShowAll(Show):
    def files(self, sample, output):
        number = int(sample[0])
        return {"masks/*.bin": bytes([number]), "*.txt": str(float(output[0])).encode()} if number != 9 else {}

    def rows(self, sample, output):
        return [{"box": box, "of": float(sample[0])} for box in range(int(sample[0]) % 3)]


class Boxes(Double):
    presenter = ShowAll
"""
COUNT = 23


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with a trained run and with files, of which 5 cannot be read."""
    folder = tmp_path_factory.mktemp("predict")
    (folder / "mine.py").write_text(TASK)
    settings = ["batch.global=4", "train.steps=1", "log.writers=[json_lines]", "device=cpu"]
    for kind, name in (("Double", "run"), ("Boxes", "boxes")):
        done = CliRunner().invoke(
            cli.app, ["train", f"{folder / 'mine.py'}:{kind}", *settings, "--run-dir", str(folder / name)]
        )
        assert done.exit_code == 0, done.stderr
    for number in range(COUNT):
        for kind in ("good", "bad"):
            (folder / kind).mkdir(exist_ok=True)
            broken = kind == "bad" and number in (0, 4, 5, 6, 7)
            (folder / kind / f"{number:02}.txt").write_text("cat" if broken else str(number))
    yield folder
    shutil.rmtree(folder)


def call(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def names(folder, numbers=range(COUNT)):
    return [str(folder / f"{number:02}.txt") for number in numbers]


def test_a_folder_is_predicted_in_order_and_each_file_once(run):
    done = call("predict", run / "run", run / "good/07.txt", run / "good", run / "good/*1.txt")
    assert done.exit_code == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    order = [7, *(number for number in range(COUNT) if number != 7)]
    assert [row["input"] for row in rows] == names(run / "good", order)
    assert [row["twice"] for row in rows] == [2 * number for number in order]


@pytest.mark.parametrize("world", mainly([2], [2, 3]))
def test_ranks_share_the_files_and_write_what_one_rank_writes(run, tmp_path, world):
    alone = call("predict", run / "run", run / "bad", "--on-error", "skip").stdout
    printed = run_ranks(world, rank_cases.command, "predict", run / "run", run / "bad", "--on-error", "skip")
    assert printed == [alone, *[""] * (world - 1)]
    path = tmp_path / "rows.csv"
    arguments = ("predict", run / "run", run / "good", "--out", path, "--top-k", 2)
    assert run_ranks(world, rank_cases.command, *arguments) == [""] * world
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["input"] for row in rows] == names(run / "good")
    assert [json.loads(row["all"]) for row in rows] == [[2 * number, 3 * number] for number in range(COUNT)]
    assert list(tmp_path.iterdir()) == [path]


def files_of(folder):
    files = [path for path in folder.rglob("[!.]*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_write_the_files_of_their_samples_and_all_rows_into_a_folder(run, tmp_path, world):
    arguments = ("predict", run / "boxes", run / "bad", "--on-error", "skip", "--out", tmp_path / "new")
    run_ranks(world, rank_cases.command, *arguments)
    found = files_of(tmp_path / "new")
    rows = [json.loads(line) for line in found.pop("predictions.jsonl").splitlines()]
    readable = [number for number in range(COUNT) if number not in (0, 4, 5, 6, 7)]
    written = {f"masks/{number:02}.bin": bytes([number]) for number in readable if number != 9}
    written |= {f"{number:02}.txt": str(2.0 * number).encode() for number in readable if number != 9}
    assert found == written
    expected = []
    for number in range(COUNT):
        (place,) = names(run / "bad", (number,))
        if number not in readable:
            expected.append({"input": place, "error": next(row["error"] for row in rows if row["input"] == place)})
        else:
            expected += [{"input": place, "box": box, "of": float(number)} for box in range(number % 3)]
    assert rows == expected


def test_inputs_with_one_name_do_not_overwrite_each_other(run, tmp_path):
    places = ["a/1.txt", "b/1.txt", "b/1.text", "b/x.y.txt"]
    for number, place in enumerate(places):
        path = tmp_path / "in" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number))
    out = tmp_path / "out"
    for more in ((), ("--force",)):  # files that are there are replaced
        inputs = (tmp_path / "in" / place for place in places)
        done = call("predict", run / "boxes", *inputs, "--out", f"{out}/", *more)
        assert done.exit_code == 0, done.stderr
    kept = {path: content for path, content in files_of(out).items() if path.startswith("masks")}
    stems = ["a/1", "b/1.txt", "b/1.text", "b/x.y"]
    assert kept == {f"masks/{stem}.bin": bytes([number]) for number, stem in enumerate(stems)}
    assert "4 predictions" in done.stderr


@pytest.mark.exhaustive
def test_rows_in_one_file_and_objects_where_a_sample_has_one(run, tmp_path):
    inputs = [run / "bad", "--on-error", "skip"]
    assert call("predict", run / "boxes", *inputs, "--out", tmp_path / "rows.json").exit_code == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    readable = [number for number in range(COUNT) if number not in (0, 4, 5, 6, 7)]
    assert [(row["of"], row["box"]) for row in rows] == [(n, box) for n in readable for box in range(n % 3)]
    assert call("predict", run / "boxes", *inputs, "--out", tmp_path / "rows.csv").exit_code == 0
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert len([row for row in csv.DictReader(file) if not row["error"]]) == len(rows)
    assert call("predict", run / "boxes", *inputs, "--out", tmp_path / "rows.npz").exit_code == 0
    assert len(np.load(tmp_path / "rows.npz")["twice"]) == len(readable)
    printed = [json.loads(line) for line in call("predict", run / "boxes", *inputs).stdout.splitlines()]
    assert [row["twice"] for row in printed if "error" not in row] == [2 * number for number in readable]
    assert call("predict", run / "run", run / "good", "--out", tmp_path / "rows.json", "--force").exit_code == 0
    assert [row["twice"] for row in json.loads((tmp_path / "rows.json").read_text())] == [2 * n for n in range(COUNT)]


def test_a_folder_that_cannot_be_written_is_known_before_anything_is_computed(run, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "no" / "folder"):
        done = call("predict", run / "boxes", run / "good", "--out", out)
        assert done.exit_code == 2
        assert "cannot be written there" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_of_somebody_else_is_refused_before_anything_is_computed(run, tmp_path, monkeypatch):
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "0.bin").write_text("drawn by hand")
    monkeypatch.setattr(Trainer, "predict_rows", lambda *_, **__: pytest.fail("it computes"))
    done = call("predict", run / "boxes", run / "good", "--out", tmp_path)
    assert done.exit_code == 2
    assert "the folder contains more than predictions of Lockstep: masks/. Predictions could replace" in done.stderr
    assert (tmp_path / "masks" / "0.bin").read_text() == "drawn by hand"
    assert not (tmp_path / "predictions.jsonl").exists()


def test_a_file_that_cannot_be_read_ends_the_command_and_leaves_no_output(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    done = call("predict", run / "run", run / "bad", "--out", path, "--force")
    assert done.exit_code == 1
    assert f"{run / 'bad/00.txt'}: sample 0 cannot be read" in done.stderr
    assert "--on-error skip" in done.stderr
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_cannot_be_read_are_named_in_their_place_and_the_others_go_on(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    done = call("predict", run / "run", run / "bad", "--out", path, "--on-error", "skip")
    assert done.exit_code == 0, done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["input"] for row in rows] == names(run / "bad")
    wrong = [row for row in rows if "error" in row]
    assert [row["input"] for row in wrong] == names(run / "bad", (0, 4, 5, 6, 7))
    assert all(row.keys() == {"input", "error"} and "could not convert string" in row["error"] for row in wrong)
    assert f"{COUNT - 5} predictions: {path}" in done.stderr
    assert "warning: 5 inputs could not be read" in done.stderr
    assert str(run / "bad/06.txt") in done.stderr


def test_arrays_leave_out_what_cannot_be_read_where_they_can_tell_the_names(run, tmp_path):
    done = call("predict", run / "run", run / "bad", "--out", tmp_path / "rows.npz", "--on-error", "skip")
    assert done.exit_code == 0, done.stderr
    arrays = np.load(tmp_path / "rows.npz")
    readable = [number for number in range(COUNT) if number not in (0, 4, 5, 6, 7)]
    assert arrays["input"].tolist() == names(run / "bad", readable)
    assert arrays["twice"].tolist() == [2 * number for number in readable]
    done = call("predict", run / "run", run / "bad", "--out", tmp_path / "rows.safetensors", "--on-error", "skip")
    assert done.exit_code == 2
    assert "numbers only" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["--top-k", "two"], "Invalid value for '--top-k'"),
        (["--on-error", "ignore"], "Invalid value for '--on-error'"),
        (["--nproc", "none"], "'none' is not a number of ranks"),
        (["--preset", "nothing"], "there is no preset 'nothing'"),
        ([], "there is no evaluation data"),
    ],
)
def test_wrong_usage_is_said(run, arguments, expected):
    done = call("predict", run / "run", *arguments)
    assert done.exit_code in (1, 2)
    assert expected in " ".join(done.stderr.replace("│", " ").split())


def test_an_option_that_the_task_does_not_have_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call("train", "toy", "train.steps=1", "log.writers=[json_lines]")
    done = call("predict", "runs/toy", "--top-k", 3)
    assert done.exit_code == 2
    assert "--top-k: task.top_k: unknown key" in done.stderr


def test_standard_input_is_for_one_rank(run):
    (answer, _) = run_ranks(2, rank_cases.refusal, "predict", run / "run", "-")
    assert "2 ranks cannot all read standard input" in answer


def test_ranks_that_find_other_files_say_so(run):
    answers = run_ranks(2, rank_cases.refusal_with_other_files, run / "run", run / "good")
    assert all("the ranks found 1, 2 samples" in answer for answer in answers)


@pytest.mark.parametrize(("err", "out", "to_file", "shown"), [(1, 0, 0, 1), (1, 1, 0, 0), (1, 1, 1, 1), (0, 1, 1, 0)])
def test_the_bar_is_on_a_terminal_where_no_predictions_go(run, tmp_path, monkeypatch, err, out, to_file, shown):
    from lockstep import Trainer
    from lockstep.cli import progress

    seen = []
    bar = progress.bar
    monkeypatch.setattr(progress, "bar", lambda what, shown: seen.append(shown) or bar(what, shown=False))
    monkeypatch.setattr(Trainer, "predict_rows", lambda *_, **__: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: bool(err))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: bool(out))
    path = tmp_path / "rows.jsonl" if to_file else None
    predict._predict(Trainer({"task": {"kind": "toy"}}, run_dir=run / "run"), [], 1, path, None)
    assert seen == [bool(shown)]


def test_neither_an_input_nor_a_file_of_the_run_is_replaced(run, tmp_path):
    (tmp_path / "a.json").write_text("1")
    for out, message in (
        (tmp_path / "a.json", "is an input, and would be replaced"),
        (run / "run" / "metrics.jsonl", "is a file of the run, and would be replaced"),
    ):
        before = out.read_bytes()
        done = call("predict", run / "run", tmp_path / "a.json", "--out", out)
        assert done.exit_code == 2
        assert message in done.stderr
        assert out.read_bytes() == before
