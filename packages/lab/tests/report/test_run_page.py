"""The page of a run: a real run, made-up runs, and runs of which little is left."""

import base64
import hashlib
import json
import re

import pytest

from lockstep import locks
from lockstep.core.errors import UsageError
from lockstep.parts import evaluations_file
from lockstep_lab.report import charts, evaluations, run, run_page
from packages.lab.tests.report import cases
from packages.lab.tests.report.cases import NASTY, Page, write_checkpoint, write_run
from tests import own_tasks, runs
from tests.selection import mainly


def page(folder):
    return Page(run_page.to_html(run.read(folder)))


def test_a_real_run(tmp_path):
    settings = runs.config(train={"eval_every_steps": 10, "steps": 20}, checkpoint={"keep_best": "min eval/loss"})
    runs.fit(own_tasks.Masked(eval_length=20), settings, tmp_path / "run")
    read = page(tmp_path / "run")
    assert "Complete at step 20" in read.text
    assert "Left out" not in read.text
    (loss,) = (chart for chart in read.data["charts"] if chart["title"] == "Loss")
    assert loss["labels"] == ["train/loss", "eval/loss"]
    assert [table[0] for table in loss["tables"]] == [[5, 10, 15, 20], [10, 20]]
    assert "best: min eval/loss" in read.text
    assert "This run has not been verified" in read.text
    assert "Sequential" in read.text


def test_what_was_trained_and_how_it_went(tmp_path):
    read = page(write_run(tmp_path))
    assert run.read(tmp_path).trained_s == 5.0 + 10.0  # `time_s` of a start at the entries of steps 10 and 20
    for said in (
        "toy",
        "ConvNet: 98,026 parameters",
        "rows.csv",
        "277",
        "feedfeed",
        "2 x x86_64",
        "abc123 with changes",
    ):
        assert said in read.text
    assert "Complete at step 20" in read.text
    assert read.data["marks"] == [10]  # the restart
    assert "min eval/accuracy 0.1" in read.text
    assert ["10", "best: min eval/accuracy; kept: best"] in [row[:2] for row in read.rows]
    assert read.row("2026-03-04 05:06:00")[1] == "0 to 12"
    assert read.row("2026-03-04 05:06:10") == ["2026-03-04 05:06:10+00:00", "warning: the disk is slow", "2"]
    assert read.row("Sky") == ["Sky", "0.5"]
    assert cases.REPORT in read.text
    pictures = [value for tag, name, value in read.attributes if (tag, name) == ("img", "src")]
    assert pictures == ["data:image/png;base64," + base64.b64encode(cases.PNG).decode()]


def test_result_and_hyperparameters_come_first_and_the_rest_is_folded(tmp_path):
    text = run_page.to_html(run.read(write_run(tmp_path, batch={"global": 32}, train={"epochs": 3, "steps": None})))
    titles = re.findall(r"<h2>([^<]+)</h2>", text)
    assert titles[:4] == ["Result", "Hyperparameters", "Curves", "Evaluations"]
    assert re.findall(r"<details><summary><h2>([^<]+)</h2>", text) == titles[4:]
    shown = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", text.partition("Hyperparameters</h2>")[2]))
    assert shown["learning rate"] == "0.1"
    assert shown["global batch"] == "32"
    assert shown["length"] == "3 epochs"
    assert "schedule" not in shown  # the config has none


def test_the_commands_that_repeat_and_verify(tmp_path):
    folder = write_run(tmp_path / "a run")
    text = page(folder).text
    assert "deletes this run first (--fresh)" in text
    assert "lockstep train toy optim.lr=0.1 --fresh --run-dir runs/made --nproc 2" in text
    anew = f"git checkout abc123\nlockstep train toy optim.lr=0.1 --nproc 2 --run-dir '{folder}-again'"
    assert anew in text
    assert "lockstep verify toy optim.lr=0.1 --run-dir runs/made --nproc 2" in text


def test_a_task_that_no_command_can_make_is_in_no_command(tmp_path):
    folder = write_run(tmp_path / "run", task={})
    about = json.loads((folder / "environment.json").read_text())
    for command in (["/env/lib/ipykernel_launcher.py", "-f", "kernel-1.json"], ["mine.py"]):
        (folder / "environment.json").write_text(json.dumps(about | {"command": command}))
        text = page(folder).text
        assert f"lockstep verify FILE.py:Task --run-dir '{folder}'".replace("'", "") in text
        assert "lockstep train" not in text
        assert "ipykernel" not in text
        assert ("python mine.py" in text) == (command == ["mine.py"])


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["train.py", "--fast"], "python train.py --fast"),
        (["/x/lockstep/__main__.py", "train", "toy"], "lockstep train toy --nproc 2"),
        ("text", "does not contain the command"),
        ([], "does not contain the command"),
        (None, "does not contain the command"),
    ],
)
def test_other_commands(tmp_path, given, shown):
    folder = write_run(tmp_path)
    (folder / "environment.json").write_text(json.dumps({"world": 2, "command": given}))
    assert shown in page(folder).text


def test_the_verdict_of_verify(tmp_path):
    folder = write_run(tmp_path)
    checks = [
        {"name": "loss", "status": "fault", "value": 0.5, "bound": 0.1, "reason": "too large"},
        {"name": "ranks", "status": "passed", "value": None, "bound": None, "reason": NASTY},
    ]
    content = {"counts": {"passed": 1, "fault": 1, "not shown": 0}, "checks": checks, "nproc": 2, "device": "cpu"}
    (folder / "verify.json").write_text(json.dumps({**content, "config": {"optim": {"lr": 0.2}}}))
    read = page(folder)
    assert "1 of 2 checks passed, 1 found a fault" in read.text
    assert read.row("loss") == ["loss", "fault", "0.5 (at most 0.1)", "too large"]
    assert "differs from the run's in: optim.lr." in read.text


def test_the_page_loads_nothing_and_runs_only_its_own_scripts(tmp_path):
    read = page(write_run(tmp_path))
    rule = next(
        value for tag, name, value in read.attributes if tag == "meta" and (value or "").startswith("default-src")
    )
    assert rule.startswith("default-src 'none'; img-src data:;")
    allowed = re.findall(r"'sha256-([^']+)'", rule)
    assert allowed == [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in read.scripts[1:]]
    assert "Permission is hereby granted, free of charge" in read.scripts[1]  # the licence goes with the library
    loading = {value for _, name, value in read.attributes if name in ("src", "href", "data", "action", "srcset")}
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in loading)
    assert not {"link", "iframe", "object", "base"} & set(read.tags)


def test_nothing_that_a_user_wrote_is_markup(tmp_path):
    rows = [cases.entry(1, **{NASTY: 1, f"eval/{NASTY}": 2, f"eval/iou/{NASTY}": 3})]
    log = [*cases.LOG, f"{cases.TIME.format(30)}  warning: {NASTY}"]
    folder = write_run(tmp_path, rows=rows, log=log, name=NASTY, task={"kind": NASTY}, more={NASTY: NASTY})
    for name in ("model.txt", "hang-1.txt"):
        (folder / name).write_text(NASTY)
    (folder / "environment.json").write_text(json.dumps({"host": NASTY, "command": [NASTY], "git": {"commit": NASTY}}))
    clean, read = page(write_run(tmp_path / "clean")), page(folder)
    assert len(read.scripts) == len(clean.scripts)
    assert "onerror" not in {name for _, name, _ in read.attributes}
    assert all(value.startswith("data:") for tag, name, value in read.attributes if tag == "img" and name == "src")
    assert NASTY in read.text
    assert any(NASTY in chart["labels"] for chart in read.data["charts"])


FILES = ("config.yaml", "environment.json", "metrics.jsonl", "train.log")


@pytest.mark.parametrize("kept", FILES)
def test_a_run_of_which_one_file_is_left(tmp_path, kept):
    folder = write_run(tmp_path / "whole")
    (tmp_path / "run").mkdir()
    (folder / kept).rename(tmp_path / "run" / kept)
    text = page(tmp_path / "run").text
    assert all(f"{name} is missing" in text for name in FILES if name != kept)


@pytest.mark.parametrize(
    "content",
    mainly(
        [b"", b"\xff\xfe\x00", b'{"a": {"b": [1, {}]}}'],
        [
            b"",
            b"\xff\xfe\x00",
            b"[1]",
            b"{",
            b"null",
            b"[" * 1200,
            b'{"a": {"b": [1, {}]}}',
            b'{"step": 1, "m": [[NaN, 1e999]]}',
        ],
    ),
)
@pytest.mark.parametrize("name", [*FILES, "verify.json", "metric_arrays.jsonl", "model.txt"])
def test_a_damaged_file_is_left_out(tmp_path, name, content):
    folder = write_run(tmp_path)
    (folder / name).write_bytes(content)
    assert "Time line" in page(folder).text


@pytest.mark.parametrize("value", mainly([None, {"a": 1}], [None, 3, "text", [1], {"a": 1}]))
@pytest.mark.parametrize(
    "key", ["task", "data", "optim", "checkpoint", "batch", "name", "counts", "checks", "git", "world"]
)
def test_values_of_another_kind(tmp_path, key, value):
    folder = write_run(tmp_path, **{key: value})
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**environment, key: value}))
    verdict = {"counts": {"passed": 1}, "checks": [{"name": "a", "value": "b"}], "config": value, "nproc": value}
    (folder / "verify.json").write_text(json.dumps({**verdict, key: value}))
    assert "Time line" in page(folder).text


def test_a_run_that_goes_on(tmp_path):
    folder = write_run(tmp_path, log=cases.LOG[:3], rows=[cases.entry(5, **{"train/loss": 1.0})])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/lo')
    read = page(folder)
    assert "Not complete: at step 5 of 20, running or killed" in read.text
    assert "1 line is damaged or half written" in read.text
    with locks.locked(folder / ".lock"):
        read = page(folder)
        assert "Not complete: at step 5 of 20, running (last line" in read.text
    assert "Not complete: at step 5 of 20, killed or failed" in page(folder).text
    assert "Nothing was evaluated yet" in read.text


def test_several_sets_of_evaluation_data(tmp_path):
    values = {"eval/clean/f1": 0.5, "eval/noisy/f1": 0.25, "eval/clean/iou/Sky": 0.125, "eval/clean/samples": 7}
    log = [*cases.LOG[:3], f"{cases.TIME.format(4)}  clean:\nA", f"{cases.TIME.format(4)}  noisy:\nB", cases.LOG[-1]]
    data = {"eval": {"clean": "a.csv", "noisy": "b.csv"}}
    read = page(write_run(tmp_path, rows=[cases.entry(20, **values)], log=log, data=data))
    assert next(row for row in read.rows if row[:2] == ["step", "eval/clean/f1"]) == [
        "step",
        "eval/clean/f1",
        "eval/noisy/f1",
    ]
    assert read.row("Sky") == ["Sky", "0.125"]
    assert ["", "clean/iou"] in read.rows
    assert "clean:\nA\n\nnoisy:\nB" in read.text
    assert [chart["labels"] for chart in read.data["charts"]] == [
        ["eval/clean/f1", "eval/noisy/f1"],
        ["eval/clean/iou/Sky"],
    ]


def test_what_lockstep_evaluate_found_is_shown_the_last_first(tmp_path):
    folder = write_run(tmp_path)
    evaluations_file.append(folder, step=10, changes=[], results={"eval/accuracy": 0.5, "eval/samples": 7})
    with (folder / evaluations_file.FILE).open("a") as file:
        file.write('{"step": 20, "cut')
    changes = [f"data.eval={NASTY}"]
    evaluations_file.append(folder, step=20, changes=changes, results={"eval/accuracy": 0.625, "eval/iou/Sky": 1})
    read = page(folder)
    place = read.rows.index(["at", "step", "changes", "eval/accuracy", "eval/samples"])
    last, first = read.rows[place + 1 : place + 3]
    assert last[1:] == ["20", f"data.eval={NASTY}", "0.625", "-"]
    assert first[1:] == ["10", "", "0.5", "7"]


def test_a_hang_is_shown(tmp_path):
    folder = write_run(tmp_path)
    (folder / "hang-20260304-050607.txt").write_text("no rank made progress for 60 s")
    for rank in range(8):  # made by watchdogs that needed them not, and left by ranks that were killed
        (folder / f"hang-rank-{rank}.txt").write_text("")
    text = page(folder).text
    assert "no rank made progress for 60 s" in text
    assert "hang-rank-0" not in text


def test_a_damaged_checkpoint_is_named(tmp_path):
    folder = write_run(tmp_path)
    (folder / "checkpoints" / "step-00000020" / "manifest.json").write_text("{")
    read = page(folder)
    assert "checkpoints/step-00000020: manifest.json is damaged" in read.text


def test_no_metric_says_which_checkpoint_is_best(tmp_path):
    folder = write_run(tmp_path, checkpoint={})
    write_checkpoint(folder, 30, {})
    assert "does not define the best checkpoint" in page(folder).text


def test_pictures_have_a_limit(tmp_path):
    folder = write_run(tmp_path)
    for step in (1, 2, 3):
        (folder / "samples" / f"worst-step-{step:08d}.png").write_bytes(cases.PNG + bytes(1000))
    (folder / "samples" / "fake.png").write_bytes(b"<svg onload=alert(1)>")
    text = "".join(evaluations.parts(run.read(folder), room=1100))
    assert text.count("data:image/png") == 2
    assert "2 images are left out" in text


def test_a_page_that_is_full_stays_below_five_megabytes(tmp_path, monkeypatch):
    """Curves, pictures and texts as large as they may be. Thinning to few points is the subject of test_charts."""
    monkeypatch.setattr(charts, "POINTS", 20_000)
    monkeypatch.setattr(run_page, "_BYTES", 3_000_000)
    folder = write_run(tmp_path)
    for number in range(12):
        (folder / "samples" / f"p{number}.png").write_bytes(cases.PNG + bytes(400_000))
    (folder / "model.txt").write_text("x" * 1_000_000)
    for number in range(20):
        (folder / f"hang-{number}.txt").write_text("x" * 1_000_000)
    assert len(run_page.to_html(run.read(folder))) < 3_000_000


def test_the_page_is_written_whole(tmp_path):
    folder = write_run(tmp_path)
    assert run_page.write(folder) == folder / "report.html"
    out = tmp_path / "x.html"
    assert run_page.write(folder, out) == out
    assert out.read_text(encoding="utf-8").endswith("</html>\n")


@pytest.mark.parametrize("name", ["empty", "none"])
def test_another_folder_is_an_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        run.read(tmp_path / name)
