"""What `lockstep look` finds in texts, and in texts without faults nothing."""

import numpy as np
import pytest

from lockstep_recipes.look.finding import ALL
from lockstep_recipes.look.look import faults, look
from lockstep_recipes.tasks.text.faults.of_tasks import OF_LABELLED
from lockstep_recipes.tasks.text.faults.view import TextSplit, TextView, chosen
from tests.text_cases import text_task

WORDS = [f"word{number}" for number in range(500)]


def sentences(count, seed=0, length=12):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, length)) for _ in range(count)]


def found(training, labels=None, evaluation=None, classes=("a", "b")):
    """The code, the place and the count of each fault."""
    labels = [("a", "b")[row % 2] for row in range(len(training))] if labels is None else labels
    splits = [TextSplit("training", training, lambda row: f"train:{row}", labels)]
    if evaluation is not None:
        names = [("a", "b")[row % 2] for row in range(len(evaluation))]
        splits.append(TextSplit("evaluation", evaluation, lambda row: f"eval:{row}", names))
    view = TextView(splits, classes)
    each = (finding for find in OF_LABELLED for finding in find(view))
    return [(fault.first.code, fault.first.file, fault.count) for fault in faults(each)]


TEXTS = sentences(100)


def test_nothing_is_found_in_texts_without_faults():
    assert found(TEXTS, evaluation=sentences(50, seed=1)) == []
    assert found(["yes", "no", "yes", "no"], labels=["a", "b", "a", "b"]) == []  # too few to say something


@pytest.mark.parametrize(
    ("faulty", "code"),
    [
        ("caf\u00c3\u00a9 and cr\u00c3\u00a8me", "wrong-encoding"),
        ("it\u00e2\u20ac\u2122s", "wrong-encoding"),
        ("caf\ufffd", "broken-characters"),
        ("a\x00b", "broken-characters"),
        ("t\x00e\x00x\x00t\x00s\x00", "wrong-encoding"),
        ("x" * 20_000, "much-longer"),
        ("x y " * 40_000, "no-lines"),
        ("QUJD" * 2_000, "no-spaces"),
    ],
)
def test_a_damaged_text_is_named(faulty, code):
    assert (code, "train:7", 1) in found([*TEXTS[:7], faulty, *TEXTS[8:]])


def test_accents_and_quotes_that_are_right_are_no_faults():
    right = ["caf\u00e9 cr\u00e8me", "S\u00c3O PAULO \u00c2ngulo", "it\u2019s \u201cfine\u201d", "a & b < c"]
    assert found([*TEXTS, *right]) == []


@pytest.mark.parametrize(
    ("rewrite", "code"),
    [
        (lambda row, text: f"<br />{text} &amp; more", "html"),
        (lambda row, text: f"['{text}', 'x']", "not-texts"),
        (lambda row, text: f"{row},5", "not-texts"),
        (lambda row, text: f"images/{row}.png", "not-texts"),
        (lambda row, text: text if row % 10 else "[deleted]", "repeated-text"),
        (lambda row, text: text if row % 10 else f"{TEXTS[0]} {row}", "copies"),
        (lambda row, text: f"{['alpha', 'gamma'][row % 2]}: {text}", "text-has-its-label"),
    ],
)
def test_a_fault_of_many_texts_is_named(rewrite, code):
    texts = [rewrite(row, text) for row, text in enumerate(TEXTS)]
    labels = [["alpha", "gamma"][row % 2] for row in range(100)]
    assert code in [fault for fault, _, _ in found(texts, labels, classes=("alpha", "gamma"))]


def test_near_copies_on_both_sides_of_the_split_are_named():
    evaluation = sentences(30, seed=1)
    evaluation[3] = TEXTS[5].upper() + "!"
    evaluation[4] = " ".join(["well", *TEXTS[6].split()[:-1]])
    assert found(TEXTS, evaluation=evaluation) == [("copies-across", "eval:3", 2)]


def test_labels_that_cannot_be_right_are_named():
    assert [code for code, _, _ in found(TEXTS, [str(row) for row in range(100)])] == ["label-is-an-id"]
    assert [code for code, _, _ in found(sentences(200), ["a"] * 199 + ["b"])] == ["one-label-only"]
    texts = [*TEXTS, TEXTS[0].upper()]
    assert ("same-text-other-label", "train:100", 1) in found(texts, ["a", *["b"] * 100])
    assert ("class-names", "", 1) in found(TEXTS, classes=("cat", "Cat"))


CYRILLIC = [f"{one} и ещё слово" for one in ("первое", "второе", "третье", "четвёртое", "пятое", "шестое")]


def test_a_script_that_gives_the_label_away_is_named():
    labels = ["a"] * 25 + ["b"] * 75
    texts = [*TEXTS, *CYRILLIC]
    assert found(texts, [*labels, *["a"] * 6]) == [("other-script", "train:100", 6)]
    assert found(texts, [*labels, *["a", "b"] * 3]) == []  # the script says nothing about the label
    assert found([*TEXTS, CYRILLIC[0]], [*labels, "b"]) == [("other-script", "train:100", 1)]


def test_texts_that_an_export_cut_off_are_named():
    cut = [text[:60] for text in TEXTS]
    mixed = [text[: 40 + row % 21 if row % 3 else 60] for row, text in enumerate(TEXTS)]
    assert found(mixed) == [("cut-off", "train:0", sum(len(text) == 60 for text in mixed))]
    assert found(cut) == []  # all have the same length, as reads of a genome
    assert found([text[: 40 + row % 21] for row, text in enumerate(TEXTS)]) == []


def test_what_the_task_refuses_is_a_finding_and_its_texts_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.csv"
    rows = enumerate([*TEXTS, "caf\u00c3\u00a9"])
    path.write_text("text,label\n" + "".join(f"{text},{row % 2}\n" for row, text in rows))
    (fault,) = look(text_task(str(path)), ALL)
    assert (fault.first.code, fault.first.file) == ("wrong-encoding", f"{path}:102")
    path.write_text("text,label\na,x\nb,None\n")
    (fault,) = look(text_task(str(path)), ALL)
    assert (fault.first.level, fault.first.file) == ("error", f"{path}:3")


def test_the_texts_that_are_looked_at_are_spread():
    assert chosen(10, ALL) == list(range(10))
