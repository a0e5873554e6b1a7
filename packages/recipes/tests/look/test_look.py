"""The command, its page and its exit codes; the head of a log."""

import re

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from lockstep.cli.application import app
from lockstep.configs import registry
from lockstep_recipes.look.finding import DataFinding
from lockstep_recipes.look.look import faults, head, lines
from lockstep_recipes.look.page import to_html
from packages.recipes.tests.look import cases


def call(*words):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["look", *map(str, words)], prog_name="lockstep")
    return done.exit_code, done.output


def test_clean_data_ends_with_0_an_error_with_3_and_a_wrong_call_with_2(tmp_path):
    root, page = cases.masks(tmp_path / "set"), tmp_path / "look.html"
    words = ("segmentation", f"data.train={root}", "--out", page)
    code, said = call(*words)
    assert (code, "0 errors, 0 warnings" in said, page.is_file()) == (0, True, True)
    path = root / "train" / "masks" / "003.png"
    cases.save(path, 1 - np.asarray(Image.open(path)))
    code, said = call(*words)
    assert (code, "error [inverted-mask]: 1 found" in said, f"{path}: " in said) == (3, True, True)
    text = page.read_text()
    assert "inverted-mask" in text
    assert text.count("data:image/png;base64") == 1
    assert len(text) < 60_000
    assert call(*words[:2], "--all", "--out", page)[0] == 3
    page.write_text("mine")
    assert call(*words)[0] == 2
    assert call(*words, "--force")[0] == 3
    assert call("segmentation", "task.nothing=1")[0] == 2


def test_data_that_cannot_be_read_at_all_is_a_finding(tmp_path):
    code, said = call("image_folder", f"data.train={tmp_path / 'none'}", "--out", tmp_path / "a.html")
    assert (code, "error [cannot-be-used]: 1 found" in said) == (3, True)


def test_a_task_without_finders_is_named(tmp_path):
    code, said = call("toy", "--out", tmp_path / "a.html")
    assert (code, "has no finders" in said) == (2, True)


def finding(number, level="warning", code="a", **more):
    return DataFinding(level, code, f"f{number}", f"w{number}", "do it", **more)


def test_findings_are_grouped_counted_and_ordered():
    found = faults(
        [finding(1), finding(1), *(finding(number, code="b") for number in range(9)), finding(3, "error", "c")]
    )
    assert [(fault.first.code, fault.count, fault.is_error) for fault in found] == [
        ("c", 1, True),
        ("b", 9, False),
        ("a", 1, False),
    ]
    assert lines(found)[3:8] == ["warning [b]: 9 found", "  f0: w0", "  f1: w1", "  f2: w2", "  ... and 6 more"]


def test_the_page_escapes_names_and_leaves_out_images_that_cannot_be_made():
    def fails():
        raise OSError

    bad = DataFinding("error", "a", "<b>.png", "<script>", "x", fails)
    page = to_html("name", faults([bad, finding(2, image=np.zeros((3, 3, 3), np.uint8))]), ["facts"])
    assert "<script>" not in page.partition("<body>")[2]
    assert "&lt;b&gt;.png" in page
    assert len(re.findall("data:image/png", page)) == 1


def test_a_log_begins_with_what_a_sample_shows_and_a_wrong_finder_ends_no_run(tmp_path):
    root = cases.classes(tmp_path)
    (root / "train" / "cat" / "003.png").write_bytes(b"")
    task = registry.build_task({"kind": "classification"}, str(root), None)
    text = "\n".join(task.presenter(task).log_header())
    assert "WARNING: [unreadable]" in text
    assert "003.png: the file is empty" in text

    def wrong(data):
        raise ZeroDivisionError("x")

    task.finders = (wrong,)
    assert head(task) == ["note: the data was not looked at: ZeroDivisionError: x"]


def test_logs_of_tasks_with_texts_begin_with_what_is_wrong(tmp_path):
    rows = [
        f"reply {number}: {'dÃ©jÃ  vu' if number % 4 == 0 else 'seen before'} {number * 7},{number % 2}"
        for number in range(60)
    ]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    (tmp_path / "book.txt").write_text("\n\n".join(rows), encoding="utf-8")
    for kind, file, options in (
        ("text", "texts.csv", {"eval_fraction": 0}),
        ("lm", "book.txt", {"eval_fraction": 0}),
    ):
        task = registry.build_task({"kind": kind, **options}, str(tmp_path / file), None)
        (line,) = (line for line in task.presenter(task).log_header() if "[wrong-encoding]" in line)
        assert line.startswith(f"WARNING: [wrong-encoding] {tmp_path / file}")


@pytest.mark.parametrize("kind", ["classification", "segmentation", "detection"])
def test_the_head_opens_few_files(tmp_path, kind, monkeypatch):
    make = {"classification": cases.classes, "segmentation": cases.masks, "detection": cases.boxes}[kind]
    task = registry.build_task({"kind": kind}, str(make(tmp_path, count=60)), None)
    task.train_data()
    from lockstep_recipes.tasks.vision.faults import view

    opened = []
    facts_of = view.facts_of
    monkeypatch.setattr(view, "facts_of", lambda *given: opened.append(given) or facts_of(*given))
    assert head(task) == []
    assert len(opened) <= 48
